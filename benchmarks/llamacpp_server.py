"""Runs llama.cpp's server with LoRA adapters: ``python llamacpp_server.py MODEL.gguf --lora FOLDER … --port PORT``.

The program runs in a separate environment (``benchmarks.router``): ``xllamacpp`` contains llama.cpp with its server,
and ``gguf`` writes its files. Adapters of PEFT are converted to GGUF like in llama.cpp's script.
"""

import argparse
import signal
import tempfile
from pathlib import Path

import xllamacpp
from llamacpp_adapters import convert, heads_of


def main() -> None:
    """Convert the adapters, and serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--alias", default="base")
    parser.add_argument("--port", type=int)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    heads = heads_of(options.model)
    with tempfile.TemporaryDirectory(prefix="lorikeet-gguf-") as scratch:
        params = xllamacpp.CommonParams()
        params.model.path = options.model
        params.model_alias = {options.alias}
        params.port = options.port
        params.n_parallel = options.parallel
        params.n_ctx = 512 * options.parallel
        params.cpuparams.n_threads = options.threads
        params.endpoint_metrics = True
        params.lora_init_without_apply = True
        params.lora_adapters = [
            xllamacpp.CommonAdapterLoraInfo(str(convert(Path(folder), Path(scratch), heads)), 1.0)
            for folder in options.lora
        ]
        server = xllamacpp.Server(params)
        print(server.listening_address, flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
