"""Report of a launch: findings of the sanitizer, and counts of what was executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


class EmulationError(RuntimeError):
    """Error: the launch cannot continue because of a deadlock, an unknown instruction, or a jump out of the kernel."""


@dataclass
class Finding:
    """One kind of fault at one instruction.

    Args:
        kind: what is wrong, in words; the same words for the same fault.
        kernel: name of the entry.
        location: line of the source that the instruction comes from, where the PTX says so.
        instruction: the instruction as written.
        detail: thread and address of its first occurrence.
        count: how often the instruction was executed with this fault.
    """

    kind: str
    kernel: str
    location: str
    instruction: str
    detail: str
    count: int = 1

    def __str__(self) -> str:
        where = f"{self.kernel}, {self.location}: {self.kind}"
        return f"{where}\n    {self.instruction}\n    {self.detail} ({self.count} times)"


@dataclass
class Report:
    """Findings and counts of one or more launches.

    Attributes:
        findings: faults. A report without any is what a correct kernel gives.
        notes: what is allowed but worth knowing, such as two warps that store the same value to the same address.
        launches: number of launches.
        instructions: number of executed warp instructions by opcode.
        lines: number of executed warp instructions by (kernel, line of the PTX text).
        reach: bytes of each tensor's storage up to the last that was loaded, stored or copied, by the name of the first
            argument with this storage; of launches that are sanitized.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    launches: int = 0
    instructions: Counter[str] = field(default_factory=Counter)
    lines: Counter[tuple[str, int]] = field(default_factory=Counter)
    reach: dict[str, int] = field(default_factory=dict)
    _known: dict[tuple[str, ...], Finding] = field(default_factory=dict, repr=False)

    def add(self, finding: Finding, *, note: bool = False) -> None:
        """Adds a finding, or counts it if the same one is there."""
        key = (finding.kind, finding.kernel, finding.location, finding.instruction)
        known = self._known.get(key)
        if known is not None:
            known.count += finding.count
            return
        self._known[key] = finding
        (self.notes if note else self.findings).append(finding)

    def kinds(self) -> set[str]:
        """The kinds of the findings."""
        return {finding.kind for finding in self.findings}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.launches} launches, no finding"
        return "\n".join(map(str, self.findings))
