"""Table of docs/huggingface.md, from the sweep: ``python tests/support/huggingface_table.py --write`` writes it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import huggingface_models as models
import huggingface_sweep as sweep

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BEGIN, END = "<!-- written by tests/support/huggingface_table.py -->", "<!-- end of what is written -->"
KINDS = {
    "causal": "causal language models", "masked": "masked language models", "seq2seq": "encoder and decoder",
    "image": "image classification", "speech": "speech, CTC", "transcription": "speech to text",
    "image and text": "image and text", "composites": "put together from two",
}  # fmt: skip
_ENDINGS = {
    "causal": "ForCausalLM", "masked": "ForMaskedLM", "seq2seq": "ForConditionalGeneration",
    "image": "ForImageClassification", "speech": "ForCTC", "transcription": "ForConditionalGeneration",
}  # fmt: skip


def cases() -> list[models.Case]:
    """Return every model of the sweep."""
    return models.language_models() + models.other_models()


def label(what: str, why: str, case: models.Case) -> str:
    """Return the table's text for a verdict."""
    if what == sweep.NOT_MADE:
        return f"not tried: {models.NOT_MADE.get(case.name, why)}"
    if what != sweep.REFUSED:
        return {
            sweep.EQUAL: "equal to eager",
            sweep.UNTOUCHED: "equal: it has no attention to replace",
            sweep.ALONE: "equal, by attention of its own: it asks for no mask",
            sweep.NO_SUCH_LAYER: "not made: a `KeyError` of its table of layers",
        }[what]
    missing = re.search(r"has no (.*?) \(", why)
    return f"refused: {missing[1]}" if missing else "refused: attention of its own"


def row_of(case: models.Case) -> tuple[str, str]:
    """Return (kind, name) of a model in the table."""
    if case.parts:
        return KINDS["composites"], " + ".join((case.name.removesuffix("Model"), *case.parts))
    return KINDS[case.kind], case.name.removesuffix(_ENDINGS.get(case.kind, "-"))


def table(labels: dict[models.Case, str]) -> str:
    """Return the table and the version of transformers, in Markdown."""
    import transformers

    groups: dict[tuple[str, str], list[str]] = {}
    for case, said in labels.items():
        kind, name = row_of(case)
        groups.setdefault((kind, said), []).append(name)
    order = list(KINDS.values())
    lines = [f"Seen with transformers {transformers.__version__}.", "", "| kind | | models |", "| --- | --- | --- |"]
    for (kind, said), names in sorted(groups.items(), key=lambda group: (order.index(group[0][0]), group[0][1])):
        lines.append(f"| {kind} | {said} | {len(names)}: {', '.join(sorted(names, key=str.lower))} |")
    return "\n".join(lines)


def documented() -> tuple[str, dict[tuple[str, str], str]]:
    """Return (version of transformers, the page's verdict per (kind, name))."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    said = {}
    for kind, what, names in re.findall(r"^\| (.+?) \| (.+?) \| \d+: (.+) \|$", text, re.MULTILINE):
        said |= {(kind, name): what for name in names.split(", ")}
    version = re.search(r"Seen with transformers (\S+)\.$", text, re.MULTILINE)
    return version[1] if version else "", said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}, instead of printing")
    write = parser.parse_args().write

    import transformers

    transformers.logging.set_verbosity_error()
    sweep.integration.register()
    labels = {}
    for case in cases():
        labels[case] = label(*sweep.verdict(case), case)
        print(f"{case.kind}: {case}: {labels[case]}", file=sys.stderr, flush=True)
    text = table(labels)
    if not write:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
