"""Versions of Triton that the kernels were compiled and tried with, and what a version lacks."""

FIRST, LAST = (3, 6), (3, 9)
_WAITS = "on sm_90 its assembler makes matrix products wait for one another, "
_LACKS = {
    (3, 6): f"{_WAITS}in forwards of more than 512 keys with heads of 128, with documents or without a mask",
    (3, 7): f"{_WAITS}in the gradient of q with documents, a dense mask and heads of 128",
    (3, 9): f"{_WAITS}in forwards of up to 512 keys or with a dense mask, and in the gradient of q of short packed "
    "batches; the backward of a packed batch draws dropout again",
}
"""By version: what the table of benchmarks/results/static/spills.md shows."""


def is_known(version: str) -> bool:
    """Return True if the kernels were compiled with this version, and its compiled kernels are called as those of the
    others: the launches of a call may be repeated without Triton."""
    return FIRST <= _release(version) <= LAST


def keeps_packed_bits(version: str) -> bool:
    """Return True if the kernels of packed batches that keep bits of dropout spill nothing in their loops."""
    return _release(version) < (3, 9)


def limits(version: str) -> str:
    """Text on what a call has to do without under this version of Triton; "" for nothing."""
    if is_known(version):
        return _LACKS.get(_release(version), "")
    first, last = (".".join(map(str, ends)) for ends in (FIRST, LAST))
    return f"the tiles suit {first} to {last}; a loop may spill registers, and Triton prepares each call again"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
