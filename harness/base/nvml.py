"""NVIDIA GPUs and MIG instances as NVML lists them, and those that CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from typing_extensions import TypedDict

VISIBLE = "CUDA_VISIBLE_DEVICES"
UUIDS = ("GPU-", "MIG-")  # how those of cards and of parts of them begin


class Gpu(TypedDict):
    """A GPU, or an instance of one. Null: not reported, such as the memory of a GB10, which has none of its
    own, or of a whole GPU in a container that has one instance of it."""

    uuid: str
    name: str | None
    memory_bytes: int | None
    driver: str | None
    compute_capability: str | None


class _Device(NamedTuple):
    """`ids`: the names by which CUDA_VISIBLE_DEVICES may mean it, in full."""

    gpu: Gpu
    ids: tuple[str, ...]


class _Card(NamedTuple):
    """A GPU of NVML's index, and the devices that programs can use: itself, or its MIG instances."""

    uuid: str | None
    devices: list[_Device]


def nvidia_gpus() -> list[Gpu]:
    """All of this machine, in the order of NVML (by PCI bus). In place of a GPU in MIG mode: its instances.
    Empty without a driver. A GPU that has no UUID for us cannot be given to a worker, and is left out."""
    return [device.gpu for card in _cards() for device in card.devices]


def visible_gpus() -> list[Gpu]:
    """The GPUs in CUDA_VISIBLE_DEVICES, in its order; without the variable, all.

    The variable has indices, UUIDs or unique beginnings of them, separated by commas. An invalid id hides
    later ones, a repeated one hides all, as in CUDA (CUDA programming guide, "CUDA environment variables",
    and _parse_visible_devices of torch/cuda/__init__.py). Indices count in the order of NVML and nvidia-smi,
    whatever CUDA_DEVICE_ORDER says: CUDA's own default, the fastest first, is not known without CUDA. The
    index of a GPU in MIG mode means its first instance, the only one that CUDA would use.
    """
    cards = _cards()
    if (ids := os.environ.get(VISIBLE)) is None:
        return [device.gpu for card in cards for device in card.devices]
    chosen: list[Gpu] = []
    for word in ids.split(","):
        if (gpu := _meant(word.strip(), cards)) is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def compute_capabilities() -> list[str]:
    """Capabilities of the visible GPUs, without repetition, the lowest first: `["8.6", "12.0"]`."""
    versions = {gpu["compute_capability"] for gpu in visible_gpus()} - {None}
    return sorted(map(str, versions), key=lambda version: [int(part) for part in version.split(".")])


def _meant(word: str, cards: list[_Card]) -> Gpu | None:
    """The device of one id in CUDA_VISIBLE_DEVICES; None for none, and for a beginning that several have."""
    if number := re.match(r"[+-]?\d+", word):  # as strtol reads it
        index = int(number[0])
        devices = cards[index].devices if 0 <= index < len(cards) else []
        return devices[0].gpu if devices else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    of_cards = [card.devices[0].gpu for card in cards if (card.uuid or "").startswith(word) and card.devices]
    devices = [device for card in cards for device in card.devices]
    instances = [each.gpu for each in devices if any(name.startswith(word) for name in each.ids)]
    meant = of_cards or instances
    return meant[0] if len(meant) == 1 else None


def _cards() -> list[_Card]:
    with _opened() as nvml:
        if nvml is None:
            return []
        driver = reported(nvml, "nvmlSystemGetDriverVersion")
        count = reported(nvml, "nvmlDeviceGetCount") or 0
        handles = [reported(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        return [_Card(None, []) if handle is None else _card(nvml, handle, driver) for handle in handles]


def _card(nvml: Any, handle: Any, driver: str | None) -> _Card:
    uuid = reported(nvml, "nvmlDeviceGetUUID", handle)
    capability = reported(nvml, "nvmlDeviceGetCudaComputeCapability", handle)

    def device(handle: Any, uuid: str, *ids: str) -> _Device:
        memory = reported(nvml, "nvmlDeviceGetMemoryInfo", handle)
        gpu: Gpu = {
            "uuid": uuid,
            "name": reported(nvml, "nvmlDeviceGetName", handle),
            "memory_bytes": None if memory is None else int(memory.total),
            "driver": driver,
            "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        }
        return _Device(gpu, (uuid, *ids))

    instances = []
    for instance in mig_instances(nvml, handle):
        if own := reported(nvml, "nvmlDeviceGetUUID", instance):
            ids_of_instance = [
                reported(nvml, f"nvmlDeviceGet{of}InstanceId", instance) for of in ("Gpu", "Compute")
            ]
            # As drivers before R470 named it; CUDA still knows it by that.
            instances.append(device(instance, own, f"MIG-{uuid}/{ids_of_instance[0]}/{ids_of_instance[1]}"))
    return _Card(uuid, instances or ([device(handle, uuid)] if uuid else []))


def mig_instances(nvml: Any, handle: Any) -> list[Any]:
    """NVML's handles of the MIG instances of a GPU that this process may see; empty without MIG mode.
    `nvml`: pynvml, or a module with its functions, open."""
    mode = reported(nvml, "nvmlDeviceGetMigMode", handle)
    most = (reported(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0) if mode and mode[0] else 0
    instances = [
        reported(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(most)
    ]
    return [instance for instance in instances if instance is not None]


def reported(nvml: Any, function: str, *arguments: object) -> Any:
    """The result of an NVML function; None if NVML has none: not supported, not permitted, not found."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


@contextmanager
def _opened() -> Iterator[Any]:
    """pynvml, open for as long as the block runs; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        reported(pynvml, "nvmlShutdown")
