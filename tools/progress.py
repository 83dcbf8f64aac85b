"""Run a set-up command and show its progress in short lines, at least one line every few seconds.

    python tools/progress.py "C++ extension" python setup.py build_ext --inplace

Lines show the packages that pip collects and installs, and the messages of setup.py, one for each compiled file. After
some seconds without output, a line shows the elapsed time. If the command fails, its whole output is printed. Only the
standard library is needed, because this runs before anything is installed.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

QUIET = 8.0  # seconds without a line, after which one says how long it takes
PLAIN = ("Collecting ", "Installing ", "Successfully ", "transformer_fast: ", "* ")


def main(arguments: list[str]) -> int:
    what, *command = arguments
    say(f"{what}: {' '.join(command)}")
    start = shown = time.monotonic()
    everything = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=read, args=(process.stdout, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, shown + QUIET - time.monotonic()))
        except queue.Empty:
            short = f"... {time.monotonic() - start:.0f} s"
        else:
            if line is None:
                break
            everything.append(line)
            short = shortened(line)
        if short:
            say(f"   {short}")
            shown = time.monotonic()
    code = process.wait()
    if code != 0:
        say("".join(everything))
    say(f"{what}: {'done' if code == 0 else f'failed with exit code {code}'} ({time.monotonic() - start:.0f} s)")
    return code


def read(stream: Iterable[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def shortened(line: str) -> str:
    """Short form of a line that is worth showing; empty for all others."""
    line = line.strip()
    if not line.startswith(PLAIN):
        return ""
    return line.partition(" (from ")[0][:110]


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
