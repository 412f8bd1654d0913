"""Text in, drafted text out, through a running server: python -m scripts.draft_client "What is 2 + 2?"

Renders the conversation with the archive's own tokenizer and chat settings (drafter/chat.py, as in training),
posts the ids to /draft and decodes the answer. Standard library for the HTTP part. The last line is JSON.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from drafter.chat import Chat
from drafter.console import run_command
from drafter.provenance import ROOT, read_json

# A proxy named in the environment would be asked for 127.0.0.1 too.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, body: dict[str, Any] | None = None, timeout_s: float = 60) -> dict[str, Any]:
    """GET, or POST when there is a body. ValueError with the server's own message when it refuses."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answers {error.code}: {json.load(error)['error']['message']}") from None
    except OSError as error:
        raise ValueError(f"no server at {url} ({error}); start one: bash serve.sh") from None


def open_chat(model_dir: Path, info: dict[str, Any]) -> Chat:
    """The tokenizer and chat settings of the archive that is served. ValueError when `model_dir` is another one."""
    archive_id = read_json(model_dir / "manifest.json")["archive_id"]
    if archive_id != info["archive_id"]:
        raise ValueError(
            f"{model_dir} is archive {archive_id[:12]} but the server serves {info['archive_id'][:12]}; "
            "give the served folder with --model-dir"
        )
    return Chat.load(model_dir, thinking=info["thinking"], stop_ids=info["stop_ids"], num_ids=info["num_ids"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("text", nargs="?", help="the user's message")
    add("--messages", type=Path, help='JSON file of [{"role", "content"}, ...] instead of a text; - for stdin')
    add("--model-dir", type=Path, default=ROOT / "model", help="the served archive, for its tokenizer")
    add("--url", default="http://127.0.0.1:8000", help="where the server listens")
    add("--num-draft-tokens", type=int, help="default: what the server says")
    args = parser.parse_args(argv)
    if (args.text is None) == (args.messages is None):
        parser.error("give a text or --messages")
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    messages = [{"role": "user", "content": args.text}]
    if args.messages is not None:
        messages = json.loads(sys.stdin.read() if str(args.messages) == "-" else args.messages.read_text("utf-8"))
    chat = open_chat(args.model_dir, ask(f"{args.url}/info"))
    prompt_ids = chat.render(messages)
    body: dict[str, Any] = {"tokens": prompt_ids}
    if args.num_draft_tokens is not None:
        body["num_draft_tokens"] = args.num_draft_tokens
    answer = ask(f"{args.url}/draft", body)
    text = chat.decode(answer["draft"])
    print(text)
    print(json.dumps({"prompt_ids": prompt_ids, "text": text, **answer}))


if __name__ == "__main__":
    raise SystemExit(main())
