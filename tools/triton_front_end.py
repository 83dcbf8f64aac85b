"""Compile the front end of every launch with another Triton than the pinned one: what pyproject.toml allows is tried.

    python tools/triton_front_end.py 3.6.0 3.9.0

By default with the oldest and the newest version (tools/triton_versions.py). The front end turns the source of a kernel
into Triton's own representation; what a version of Triton cannot read fails there. No GPU is needed. A launch that
fails is printed with its first error. So is a launch whose kernel is another one than in the record of what kernels
spill (tools/triton_spills.py).
"""

from __future__ import annotations

import argparse
import sys
import time

from triton_versions import VERSIONS, check_imported, start_with

CAPABILITY = 90


def compile_all(version: str) -> int:
    """Compile the front end of every launch with the Triton that is imported; return 1 if one failed."""
    check_imported(version)
    import triton_spills

    from tools.triton_kernels import cases, front_end_digest, triton_ir

    start, failed, record = time.monotonic(), [], triton_spills.read()
    launches = [launch for arch, launch in cases() if arch == CAPABILITY]
    for launch in launches:
        try:
            digest = front_end_digest(triton_ir(launch, CAPABILITY))
            recorded = record.get(launch.name, {}).get(version)
            if recorded is not None and recorded.digest != digest:
                raise ValueError("another kernel than in the record of spills; run tools/triton_spills.py")
        except Exception as error:
            failed.append(launch.name)
            reason = (str(error.__cause__ or error).strip().splitlines() or [""])[-1]
            print(f"   {launch.name}: {type(error).__name__}: {reason[:200]}", flush=True)
    passed, count = len(launches) - len(failed), len(launches)
    print(f"Triton {version}: {passed} of {count} launches for sm_{CAPABILITY} ({time.monotonic() - start:.0f} s)")
    return int(bool(failed) or not count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions",
        nargs="*",
        default=[VERSIONS[0], VERSIONS[-1]],
        metavar="VERSION",
        help="default: the oldest and the newest",
    )
    parser.add_argument("--imported", help=argparse.SUPPRESS)  # in the process of one version
    options = parser.parse_args()
    if options.imported:
        return compile_all(options.imported)
    codes = []
    for version in options.versions:
        process = start_with(version, __file__, "--imported", version)
        for line in process.stdout:
            print(line, end="", flush=True)
        codes.append(process.wait())
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
