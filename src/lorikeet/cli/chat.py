"""``lorikeet chat``: chat with a running server in the terminal."""

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from lorikeet.cli.console import fail
from lorikeet.cli.http_client import DEFAULT_URL, AnswerError, ApiKey, ServerClient, Url
from lorikeet.core.text import unknown_name

_HELP = (
    "/adapter NAME changes to that adapter (alone: back to the base), /adapters lists them, /new forgets, /quit ends"
)


class Conversation:
    """Runs a conversation without the terminal: takes lines and writes text.

    Args:
        api: the server.
        model: name of the base model or of an adapter.
        parameters: fields that are sent with every request.

    Raises:
        SystemExit: the server does not serve the model. Its models have been printed.
    """

    def __init__(self, api: ServerClient, model: str | None = None, **parameters: float | int) -> None:
        self._api = api
        self._names = [card["id"] for card in api.get("/v1/models")["data"]]
        if model is not None and model not in self._names and not api.has_model(model):
            fail(unknown_name("model", model, self._names))
        self.model = model or self._names[0]
        self._parameters = parameters
        self._messages: list[dict[str, str]] = []

    def take(self, line: str, write: Callable[[str], None]) -> bool:
        """Handle one line, which is a command or a message. Return False at the end of the conversation."""
        command, _, argument = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/new":
                self._messages.clear()
                write("a new conversation\n")
            case "/adapters":
                write("\n".join(self._refresh_names()[1:] or ["none"]) + "\n")
            case "/adapter":
                self._change_model(argument.strip(), write)
            case _ if command.startswith("/"):
                write(_HELP + "\n")
            case _:
                self._answer(line, write)
        return True

    def _answer(self, line: str, write: Callable[[str], None]) -> None:
        question = {"role": "user", "content": line}
        answer = ""
        try:
            for piece in self._api.stream_chat(self.model, [*self._messages, question], **self._parameters):
                write(piece)
                answer += piece
        except AnswerError as error:
            write(f"\n{error}\nThis message is not part of the conversation.\n")
            return
        except KeyboardInterrupt:  # The part of the answer that has arrived is kept.
            pass
        write("\n")
        self._messages += (question, {"role": "assistant", "content": answer})

    def _change_model(self, name: str, write: Callable[[str], None]) -> None:
        names = self._refresh_names()
        wanted = name or names[0]
        if wanted not in names:
            write(f"no adapter is called {wanted}; /adapters lists the names\n")
            return
        self.model = wanted
        write(f"now talking to {wanted}\n")

    def _refresh_names(self) -> list[str]:
        self._names = [card["id"] for card in self._api.get("/v1/models")["data"]]
        return self._names


def chat(
    model: Annotated[str | None, typer.Option(help="Base model or adapter to talk to; the base.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.7,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Talk to a running server; /adapter NAME changes the adapter in the middle of a conversation."""
    console = Console(highlight=False, markup=False, emoji=False)
    conversation = Conversation(ServerClient(url, api_key), model, max_tokens=max_tokens, temperature=temperature)
    console.print(f"{conversation.model} at {url}. {_HELP}.", soft_wrap=True)

    def write(text: str) -> None:
        print(text, end="", flush=True)  # The console would turn tabs into spaces.

    while True:
        try:
            line = console.input(f"{conversation.model}> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not conversation.take(line, write):
            return
