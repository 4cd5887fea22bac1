"""`python3 -m benchmarks.gpu`: the suite without rollspec's command line, whose packages a bare machine may lack."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu.suite import Options, run


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=benchmarks.gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="budget; what does not fit is left out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run that claims nothing")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false", help="only the parts that need no vLLM")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run finished")
    parser.add_argument("--only", nargs="*", default=[], help="parts, or the beginnings of their names")
    parser.add_argument("--model", type=Path, help="real checkpoint; default: the demo's policy")
    parser.add_argument("--head", type=Path, help="a draft head of that checkpoint")
    parser.add_argument("--prompts", type=Path, help="prompts for that checkpoint, as `drafter-online make-head` reads")
    parser.add_argument("--engine", type=json.loads, default={}, help="options of every vllm.LLM, as JSON")
    parser.add_argument("--together", type=int, default=1, help="parts that run at once, of those that are not timed")
    parser.add_argument("--commit", help="of a copy without its .git, made from a clean tree")
    parser.add_argument("--out", type=Path, help="the JSON; the page lies beside it")
    parser.add_argument("--json", action="store_true", help="print the JSON on stdout")
    given = vars(parser.parse_args())
    as_json, only = given.pop("json"), tuple(given.pop("only"))
    show(run(Options(**given, only=only)), as_json)


def show(written: Path | None, as_json: bool) -> None:
    """Print the JSON where it was asked for; without a device, one that claims nothing."""
    if as_json:
        print(written.read_text() if written else json.dumps({"benchmark": "gpu", "measured": False, "claims": []}))


if __name__ == "__main__":
    main()
