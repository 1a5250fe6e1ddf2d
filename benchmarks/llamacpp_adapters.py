"""Converts adapters of PEFT to llama.cpp's format like its script, for programs in its environment."""

import json
import re
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight")
KINDS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def heads_of(model: str) -> dict[str, int]:
    """Return the numbers of heads for q and k in a GGUF file."""
    fields = gguf.GGUFReader(model).fields
    return {
        "attn_q": int(fields["llama.attention.head_count"].parts[-1][0]),
        "attn_k": int(fields["llama.attention.head_count_kv"].parts[-1][0]),
    }


def convert(folder: Path, target: Path, heads: dict[str, int]) -> Path:
    """Write an adapter of PEFT as GGUF, with the rows of q and k in llama.cpp's order of rotation."""
    config = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(str(target / f"{folder.name}.gguf"), "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    for name, values in read_safetensors(folder / "adapter_model.safetensors").items():
        layer, module, side = TENSOR.fullmatch(name).groups()
        short = NAMES[module]
        if side == "B" and short in heads:
            shape = heads[short], 2, values.shape[0] // heads[short] // 2, values.shape[1]
            values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"blk.{layer}.{short}.weight.lora_{side.lower()}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target / f"{folder.name}.gguf"


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Return all tensors as fp32."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        first, stop = (start + offset for offset in entry["data_offsets"])
        values = np.frombuffer(content[first:stop], KINDS[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        found[name] = values.astype(np.float32)
    return found
