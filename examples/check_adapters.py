"""Do the sample adapters keep to their styles on prompts they never saw? No model judges; see judges.py.

    python examples/check_adapters.py --url http://127.0.0.1:8000/v1    # through any OpenAI-compatible server
    python examples/check_adapters.py --direct                          # with transformers and PEFT alone

Answers are greedy and at most 64 tokens long. Exit code 1 when an adapter passes on too few prompts, or the base,
judged by the same rules, on too many.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from judges import mean_words, pass_share
from recipes import RECIPES
from rich.console import Console
from rich.table import Table
from styles import load_held_out

ADAPTERS = Path(__file__).parent / "adapters"
MAX_TOKENS = 64
MIN_ADAPTER_SHARE = 0.8
MAX_BASE_SHARE = 0.2
CONCURRENT_REQUESTS = 10

Answerer = Callable[[str | None, Sequence[str]], list[str]]
"""From an adapter's name (None: the base) and prompts to one answer each."""


class Result(NamedTuple):
    """How one adapter and the base did under the adapter's judge; shares are 0 to 1, lengths means in words."""

    adapter: str
    share: float
    base_share: float
    mean_words: float
    base_mean_words: float

    @property
    def passed(self) -> bool:
        """The adapter keeps to its style and the base does not."""
        return self.share >= MIN_ADAPTER_SHARE and self.base_share <= MAX_BASE_SHARE


def check(
    answer: Answerer, adapters: Sequence[str], prompts: Sequence[str]
) -> tuple[list[Result], dict[str, list[str]]]:
    """Ask the base once and every adapter; return the results and all answers, the base's under ``base``."""
    answers = {"base": answer(None, prompts)} | {name: answer(name, prompts) for name in adapters}
    base = answers["base"]
    results = [
        Result(name, pass_share(name, own), pass_share(name, base), mean_words(own), mean_words(base))
        for name, own in answers.items()
        if name != "base"
    ]
    return results, answers


def http_answerer(url: str, api_key: str) -> Answerer:
    """Return an answerer over an OpenAI-compatible API at ``url``, whose first listed model is the base."""
    client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {}, timeout=600)

    def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = client.request(method, path, json=body)
        if reply.is_error:
            raise typer.BadParameter(f"{reply.url} answered {reply.status_code}: {reply.text}")
        return reply.json()

    base = call("GET", "models")["data"][0]["id"]

    def answer(adapter: str | None, prompts: Sequence[str]) -> list[str]:
        def ask(prompt: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            body = {"model": adapter or base, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
            text: str = call("POST", "chat/completions", body)["choices"][0]["message"]["content"]
            return text

        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            return list(pool.map(ask, prompts))

    return answer


def direct_answerer(model: Path, adapters: Path, dtype: str) -> Answerer:
    """Return an answerer over transformers and PEFT, on one CPU thread."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def generate(network: Any, prompts: Sequence[str]) -> list[str]:
        rendered = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        inputs = tokenizer(rendered, add_special_tokens=False, padding=True, return_tensors="pt")
        with torch.inference_mode():
            tokens = network.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
        return list(tokenizer.batch_decode(tokens[:, inputs.input_ids.shape[1] :], skip_special_tokens=True))

    def answer(adapter: str | None, prompts: Sequence[str]) -> list[str]:
        if adapter is None:
            return generate(base, prompts)
        adapted = PeftModel.from_pretrained(base, adapters / adapter, autocast_adapter_dtype=False)
        try:
            return generate(adapted, prompts)
        finally:
            adapted.unload()

    return answer


def show(results: Sequence[Result], console: Console) -> None:
    """Print one row per adapter."""
    table = Table("adapter", "passes", "base passes", "words", "base words", "verdict")
    for result in results:
        verdict = "ok" if result.passed else "too weak"
        shares = f"{result.share:.0%}", f"{result.base_share:.0%}"
        table.add_row(result.adapter, *shares, f"{result.mean_words:.1f}", f"{result.base_mean_words:.1f}", verdict)
    console.print(table)


def main(
    adapters: Annotated[list[str], typer.Argument(help="Which ones to check.")] = list(RECIPES),  # noqa: B006
    url: Annotated[str, typer.Option(help="OpenAI-compatible API, with /v1 at its end.")] = "",
    direct: Annotated[bool, typer.Option("--direct", help="Use transformers and PEFT in this process.")] = False,
    model: Annotated[Path | None, typer.Option(help="With --direct: base folder; default: the default model.")] = None,
    folder: Annotated[Path, typer.Option(help="With --direct: where the adapters lie.")] = ADAPTERS,
    dtype: Annotated[str, typer.Option(help="With --direct: bfloat16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print results and answers as JSON.")] = False,
) -> None:
    """Judge the answers of every adapter and of the base to the held-out prompts."""
    if bool(url) == direct:
        raise typer.BadParameter("give either --url or --direct")
    if direct:
        from lorikeet.models.default import default_cache_dir, prepare_default_model

        answer = direct_answerer(model or prepare_default_model(default_cache_dir()), folder, dtype)
    else:
        answer = http_answerer(url, os.environ.get("OPENAI_API_KEY", ""))
    prompts = load_held_out()
    results, answers = check(answer, adapters, prompts)
    console = Console()
    if as_json:
        rows = [{**result._asdict(), "passed": result.passed} for result in results]
        console.out(json.dumps({"results": rows, "prompts": prompts, "answers": answers}, ensure_ascii=False, indent=1))
    else:
        show(results, console)
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


if __name__ == "__main__":
    typer.run(main)
