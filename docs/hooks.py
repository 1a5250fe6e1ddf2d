"""What mkdocs does beside its plugins (see mkdocs.yml).

Each package gets a page of the API reference. Links from the docs to files outside docs/ lead to the repository, or are
plain text as long as mkdocs.yml has no `repo_url`.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath

from mkdocs.structure.files import File

_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s]*)\)")


def on_files(files, config):
    """Add the pages of the API reference."""
    package = Path(config.config_file_path).parent / "src" / "lorikeet"
    for file in sorted(package.iterdir()):
        if (file / "__init__.py").is_file() or (file.suffix == ".py" and file.stem not in ("__init__", "__main__")):
            text = f"# lorikeet.{file.stem}\n\n::: lorikeet.{file.stem}\n"
            files.append(File.generated(config, f"reference/{file.stem}.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite relative links that leave docs/."""
    folder = dirname(page.file.src_uri)

    def rewrite(match):
        target = normpath(f"docs/{folder}/{match[2]}")
        if target.startswith("docs/"):
            return match[0]
        if not config.repo_url:
            return match[1]
        kind = "tree" if (Path(config.config_file_path).parent / target.partition("#")[0]).is_dir() else "blob"
        return f"[{match[1]}]({config.repo_url}/{kind}/main/{target})"

    return _LINK.sub(rewrite, markdown)
