// Builds the pages: node build.mjs FOLDER
import { build } from "esbuild";
import { copyFile, mkdir } from "node:fs/promises";
import { join } from "node:path";

const folder = process.argv[2];
if (!folder) throw new Error("name the folder to build into");
await mkdir(folder, { recursive: true });
await build({
  entryPoints: { console: "src/main.ts", docs: "src/docs.ts" },
  outdir: folder,
  bundle: true,
  minify: true,
  target: "es2022",
  format: "esm",
  legalComments: "none",
  banner: { js: "// Built from ui/ by `make ui`; do not edit." },
});
for (const name of ["ui.html", "docs.html", "console.css", "icon.svg"]) {
  await copyFile(join("src", name), join(folder, name));
}
