"""A process that has imported what every test needs, and runs pytest in forks of itself.

    mutant_server.py MODULE ...

The server reads lines of JSON, each with the arguments of pytest, its environment and the name of a file for its
output. The answer to each line is the exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

import pytest


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        arguments, environment, output = json.loads(line)
        if (child := os.fork()) == 0:
            os.environ.clear()
            os.environ.update(environment)
            for descriptor, name, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT)):
                os.dup2(os.open(name, flags), descriptor)
            os.dup2(1, 2)
            code = pytest.main(arguments)
            sys.stdout.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
