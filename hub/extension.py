"""What the launchers take from the package's C++ extension, without it: no launch is cached, and Triton makes each."""


class LaunchCall:
    def __init__(self, *_: object) -> None:
        pass


class _NoCache:
    enabled = False

    def connect(self, *_: object) -> None:
        pass

    def replay(self, _: LaunchCall) -> bool:
        return False

    def can_replay(self) -> bool:
        return False


class _Extension:
    LaunchCall = LaunchCall
    launch_cache = _NoCache()


def module() -> _Extension:
    return _Extension()
