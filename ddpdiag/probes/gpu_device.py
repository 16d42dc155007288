"""One GPU's handle, asked question by question. Only a worker does it, since NVML may hang in a driver.

Every question has a return code of its own: an old driver lacks a function, a model lacks a sensor, a MIG slice may not
ask. Whatever is not answered is None. pynvml's names differ between its versions, so a function, a structure or a
constant that it lacks counts as not answered.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from ddpdiag.probes.nvml import supported

T = TypeVar("T")


class Broken(Enum):
    """What a return code says of the GPU itself, whatever was asked (nvml.h, nvmlReturn_t)."""

    LOST = "GPU is lost"
    RESET_REQUIRED = "GPU requires reset"


_BROKEN = {15: Broken.LOST, 16: Broken.RESET_REQUIRED}
# nvml.h, nvmlValueType_t: which member of the union holds a field's value.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Device:
    """A GPU that NVML has opened; `broken` is what its answers so far said of it."""

    def __init__(self, handle: object) -> None:
        import pynvml

        self._nvml = pynvml
        self._handle = handle
        self.broken: Broken | None = None

    def number(self, function: str, *arguments: int) -> int | None:
        """The one number that the function gives."""
        return self._ask(function, lambda: int(getattr(self._nvml, function)(self._handle, *arguments)))

    def towards(self, function: str, other: "Device", *arguments: int) -> int | None:
        """The one number that the function gives of this GPU and another one."""
        return self._ask(function, lambda: int(getattr(self._nvml, function)(self._handle, other._handle, *arguments)))

    def numbers(self, function: str, *arguments: int) -> tuple[int, ...] | None:
        """The numbers that the function gives (its out parameters, or a list)."""
        return self._ask(function, lambda: tuple(map(int, getattr(self._nvml, function)(self._handle, *arguments))))

    def flag(self, function: str) -> bool | None:
        """The one number, as yes or no."""
        answer = self.number(function)
        return None if answer is None else bool(answer)

    def text(self, function: str) -> str | None:
        """The text that the function gives."""
        return self._ask(function, lambda: str(getattr(self._nvml, function)(self._handle)))

    def members(self, function: str, structure: str, names: Sequence[str]) -> Mapping[str, int]:
        """Members of the structure that the function fills; empty where it does not, or pynvml lacks either."""
        kind = getattr(self._nvml, structure, None)
        if kind is None:
            return {}
        filled = kind()
        done = self._ask(function, lambda: getattr(self._nvml, function)(self._handle, ctypes.byref(filled)) == 0)
        return {name: int(getattr(filled, name)) for name in names if hasattr(filled, name)} if done else {}

    def fields(self, name: str, scopes: Iterable[int] = (0,)) -> tuple[int | None, ...]:
        """The field NVML_FI_`name` for each scope (a link's number); each value has a return code of its own."""
        function, field = "nvmlDeviceGetFieldValues", getattr(self._nvml, f"NVML_FI_{name}", None)
        wanted = [(field, scope) for scope in scopes]
        if field is None or not wanted:
            return (None,) * len(wanted)
        values = self._ask(
            function,
            lambda: tuple(
                _value(int(answer.nvmlReturn), int(answer.valueType), answer.value)
                for answer in getattr(self._nvml, function)(self._handle, wanted)
            ),
        )
        return (None,) * len(wanted) if values is None else values

    def processes(self) -> tuple[tuple[int, int | None], ...] | None:
        """Pid (of the host) and bytes of each compute process; None for bytes that are not told, as under MIG."""
        for function in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            found = self._ask(function, lambda function=function: self._processes(function))  # type: ignore[misc]
            if found is not None:
                return found
        return None

    def _processes(self, function: str) -> tuple[tuple[int, int | None], ...]:
        found = getattr(self._nvml, function)(self._handle)
        return tuple((int(process.pid), process.usedGpuMemory) for process in found)

    def of(self, ask: Callable[[object], T]) -> T | None:
        """What `ask` makes of the handle."""
        return supported(lambda: self._noted(lambda: ask(self._handle)))

    def _ask(self, function: str, ask: Callable[[], T]) -> T | None:
        return supported(lambda: self._noted(ask)) if hasattr(self._nvml, function) else None

    def _noted(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            self.broken = _BROKEN.get(error.value, self.broken)
            raise
        except (TypeError, ValueError, AttributeError, OverflowError):
            return None  # an answer of another form than this version knows, such as NaN


def _value(code: int, kind: int, value: object) -> int | None:
    """A field's value, if its own return code says that there is one."""
    return int(getattr(value, _MEMBERS[kind])) if code == 0 and kind < len(_MEMBERS) else None
