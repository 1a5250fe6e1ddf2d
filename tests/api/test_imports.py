"""The API process stays small."""

import subprocess
import sys


def test_the_api_process_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, lorikeet.api.app, lorikeet.api.run\n"
        "heavy = {name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'peft'}\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
