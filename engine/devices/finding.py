"""Which accelerators this machine has, and what each of them still needs.

Only files are looked at: nothing here imports torch or jax, which takes seconds. What only a vendor's package can tell
is asked in another process, by `asking.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ..errors import DeviceError
from ..install_hint import install_command

_ROOT = Path("/")
_PIP = "pip install --force-reinstall"
# https://rocm.docs.amd.com/projects/ai-ecosystem/en/latest/frameworks/pytorch/install.html
_ROCM_TORCH = "'torch[device-all]' --index-url https://stable.repo.amd.com/rocm/whl-next/"
_XPU_TORCH = "torch --index-url https://download.pytorch.org/whl/xpu"


class Finding(Struct, frozen=True):
    """What was found of one kind of accelerator. If it can be used, `missing` is empty.

    `nodes` are its device nodes. `facts` are what else is there: driver, packages, variables that choose among devices.
    Each of `missing` ends with how to fix it.
    """

    name: str
    nodes: tuple[str, ...]
    facts: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def found(self) -> str:
        """Nodes and facts in words; empty if there are none."""
        more = [f"and {len(self.nodes) - 1} more like it"] if len(self.nodes) > 1 else []
        return ", ".join([*(" ".join([node, *more]) for node in self.nodes[:1]), *self.facts])


class _Kind(NamedTuple):
    """How to recognize an accelerator. `pci` matches "vendor class", as sysfs writes them, of its PCI functions.

    It needs the node `shared` besides its own, and one of the `drivers`. `packages` must be importable, named by their
    distribution. Only machines with such an accelerator have the packages in `own`. `torch` is a build that torch must
    be: its name in torch/version.py, and in words.
    """

    pci: str
    node: str
    drivers: tuple[str, ...]
    container: str
    packages: Mapping[str, str]
    own: str | None
    install: Callable[[], str]
    variables: tuple[str, ...]
    shared: str | None = None
    torch: tuple[str, str] | None = None


_KINDS = {
    "cuda": _Kind(
        pci="0x10de 0x03",  # display controllers: not their audio functions, and no switches
        node="/dev/nvidia0",
        drivers=("nvidia",),
        container="docker run --gpus all",
        packages={"torch": "torch"},
        own=None,
        install=partial(install_command, "cuda"),
        variables=("CUDA_VISIBLE_DEVICES",),
        torch=("cuda", "CUDA"),
    ),
    "rocm": _Kind(
        pci="0x1002 0x(03|12)",  # display controllers, and processing accelerators: not their audio functions
        node="/dev/kfd, or an AMD GPU in /dev/dri,",
        drivers=("amdgpu",),
        container="docker run --device=/dev/kfd --device=/dev/dri",
        packages={"torch": "torch"},
        own=None,
        install=lambda: f"use the image of Dockerfile.rocm, or {_PIP} {_ROCM_TORCH}",
        variables=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        shared="/dev/kfd",
        torch=("hip", "ROCm"),
    ),
    "xpu": _Kind(
        pci="0x8086 0x03",
        node="an Intel GPU in /dev/dri",
        drivers=("xe", "i915"),
        container="docker run --device=/dev/dri",
        packages={"torch": "torch"},
        own=None,
        install=lambda: f"use the image of Dockerfile.xpu, or {_PIP} {_XPU_TORCH}",
        variables=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
        torch=("xpu", "support for Intel GPUs"),
    ),
    "hpu": _Kind(
        pci="0x1da3 ",
        node="/dev/accel/accel0",
        drivers=("habanalabs",),
        container="docker run --runtime=habana",
        packages={"torch": "torch", "habana_frameworks": "habana-torch-plugin"},
        own="habana_frameworks",
        install=lambda: "use the image of Dockerfile.hpu",
        variables=("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"),
    ),
    "neuron": _Kind(
        pci="0x1d0f 0x0880",  # system peripherals: all of Amazon's machines have disks and network cards of this vendor
        node="/dev/neuron0",
        drivers=("neuron",),
        container="docker run --device=/dev/neuron0",
        packages={"torch": "torch", "torch_neuronx": "torch-neuronx"},
        own="torch_neuronx",
        install=lambda: "use the image of Dockerfile.neuron",
        variables=("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"),
    ),
    "tpu": _Kind(
        pci="0x1ae0 0x(?!01|02)",  # not Google's disks and network cards
        node="/dev/accel0 or /dev/vfio/0",
        drivers=(),  # machines with TPUs come with theirs
        container="docker run --privileged",
        packages={"jax": "jax", "libtpu": "libtpu"},
        own="libtpu",
        install=partial(install_command, "tpu"),
        variables=("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "JAX_PLATFORMS"),
    ),
}
ACCELERATORS = tuple(_KINDS)
"""The accelerators that can be found, in the order in which `--device auto` tries them."""
_IN_PROCESSORS = ("rocm", "xpu")  # most desktop processors have such a GPU, and few of them are meant


def find(name: str, root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> Finding:
    """Look for one of ACCELERATORS. `root` is where `/dev`, `/proc` and `/sys` are.

    With JAX_PLATFORMS=cpu a TPU has no nodes and needs none: JAX computes on the CPU.
    """
    kind = _KINDS[name]
    on_cpu = _is_jax_on_cpu(name, environ)
    nodes = () if on_cpu else tuple(_nodes(name, root))
    facts = [*_driver(kind, root), *_versions(kind)]
    facts += [f"{variable}={environ[variable]}" for variable in kind.variables if variable in environ]
    missing = []
    if on_cpu:
        facts.append("JAX computes on the CPU")
    else:
        missing += _missing_hardware(kind, nodes, root)
        missing += _hidden(name, environ)
    missing += _missing_packages(name, kind, environ, on_cpu)
    return Finding(name, nodes, tuple(facts), tuple(missing))


def is_there(name: str, root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether anything says that this machine is meant for such an accelerator: a device node, or its own package and
    hardware without a node.

    A GPU of AMD or Intel counts only where torch is built for it. This takes a fraction of a millisecond, for starts on
    machines that have none.
    """
    if _is_jax_on_cpu(name, environ):
        return False
    kind = _KINDS[name]
    if any(_nodes(name, root)):
        return name not in _IN_PROCESSORS or _is_right_torch(kind)
    return kind.own is not None and _is_installed(kind.own) and _is_built_in(kind, root)


def require(name: str) -> None:
    """Raises DeviceError for an accelerator that lacks something, saying what mends it; other devices lack nothing."""
    if name in _KINDS and (missing := find(name).missing):
        raise DeviceError(f"--device {name} cannot be used: {'; '.join(missing)}")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that was put together at run time
        return True


def _is_jax_on_cpu(name: str, environ: Mapping[str, str]) -> bool:
    return name == "tpu" and environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"


def _nodes(name: str, root: Path) -> Iterator[str]:
    """The device nodes of one kind of accelerator."""
    if name == "hpu":
        yield from _accel_nodes(name, root, root / "dev/accel")
    elif name == "tpu":
        yield from _accel_nodes(name, root, root / "dev")
        for node in _numbered(root / "dev/vfio", ""):
            devices = root / "sys/kernel/iommu_groups" / node / "devices"
            if any(_is_of(name, devices / device) for device in _listed(devices)):
                yield f"/dev/vfio/{node}"
    elif name in _IN_PROCESSORS:
        shared = _KINDS[name].shared
        if shared is None or (root / shared[1:]).exists():
            for node in _numbered(root / "dev/dri", "renderD"):  # as GPUs of all vendors are called
                if _is_of(name, root / "sys/class/drm" / node / "device"):
                    yield f"/dev/dri/{node}"
    else:
        prefix = {"cuda": "nvidia", "neuron": "neuron"}[name]
        yield from (f"/dev/{node}" for node in _numbered(root / "dev", prefix))
        # Windows gives its Linux all GPUs of any vendor through one node, and the vendor's library.
        if name == "cuda" and (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
            yield "/dev/dxg"


def _accel_nodes(name: str, root: Path, folder: Path) -> Iterator[str]:
    """Compute accelerators of all vendors, such as the NPUs of laptops, have nodes of the same names."""
    for node in _numbered(folder, "accel"):
        device = root / "sys/class/accel" / node / "device"
        if not _identity(device) or _is_of(name, device):
            yield f"/{(folder / node).relative_to(root)}"


def _numbered(folder: Path, prefix: str) -> list[str]:
    names = [name for name in _listed(folder) if name.startswith(prefix) and name[len(prefix) :].isdecimal()]
    return sorted(names, key=lambda name: (len(name), name))


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _identity(device: Path) -> str:
    """A PCI function's vendor and class, such as "0x10de 0x030200"; empty if sysfs does not say."""
    vendor = _text(device / "vendor")
    return f"{vendor} {_text(device / 'class')}" if vendor else ""


def _is_of(name: str, device: Path) -> bool:
    return re.match(_KINDS[name].pci, _identity(device)) is not None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _driver(kind: _Kind, root: Path) -> list[str]:
    numbers = [_text(root / "sys/module" / driver / "version") for driver in kind.drivers]
    number = next(filter(None, numbers), "")
    if not number and "nvidia" in kind.drivers:  # some sandboxes have no /sys/module
        found = re.search(r"\s(\d+\.\d[\d.]*)\s", _text(root / "proc/driver/nvidia/version"))
        number = found[1] if found else ""
    return [f"driver {number}"] if number else []


def _versions(kind: _Kind) -> list[str]:
    from importlib.metadata import PackageNotFoundError, version  # takes a start on a CPU milliseconds that it can save

    found = []
    for package, distribution in kind.packages.items():
        if _is_installed(package):
            try:
                found.append(f"{package} {version(distribution)}")
            except PackageNotFoundError:  # built into an image without the usual records
                found.append(package)
    return found


def _missing_hardware(kind: _Kind, nodes: tuple[str, ...], root: Path) -> list[str]:
    if not nodes:
        there = _is_built_in(kind, root)
        if there and kind.drivers and not any((root / "sys/module" / driver).exists() for driver in kind.drivers):
            driver = kind.drivers[0]
            return [f"the hardware is present, but its driver is not: install it on the host, then modprobe {driver}"]
        seen = ", but the hardware is present" if there else ""
        return [f"{kind.node} is missing{seen}: {kind.container}"]
    closed = [node for node in (*filter(None, [kind.shared]), *nodes) if not _may_open(f"{root}{node}")]
    if kind.shared in closed or len(closed) == len(nodes):
        node = closed[0]
        return [f"user {os.getuid()} may not open {node}: docker run --group-add $(stat -c %g {node}), or as root"]
    return []


def _is_built_in(kind: _Kind, root: Path) -> bool:
    """Whether one of the machine's PCI functions is of this kind, even if it has no node."""
    devices = root / "sys/bus/pci/devices"
    return any(re.match(kind.pci, _identity(devices / device)) for device in _listed(devices))


def _may_open(path: str) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _hidden(name: str, environ: Mapping[str, str]) -> list[str]:
    if name == "cuda" and environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return [f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} hides all GPUs: unset it"]
    if name == "rocm" and environ.get("HIP_VISIBLE_DEVICES") == "-1":
        return ["HIP_VISIBLE_DEVICES=-1 hides all GPUs: unset it"]
    if name == "tpu" and "tpu" not in (environ.get("JAX_PLATFORMS") or "tpu").split(","):
        return [f"JAX_PLATFORMS={environ['JAX_PLATFORMS']} hides the TPU: unset it"]
    return []


def _missing_packages(name: str, kind: _Kind, environ: Mapping[str, str], on_cpu: bool) -> list[str]:
    missing = [package for package in kind.packages if not _is_installed(package)]
    if name == "tpu" and (on_cpu or environ.get("TPU_LIBRARY_PATH")):
        missing = [package for package in missing if package != "libtpu"]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return [f"{' and '.join(missing)} {verb} not installed: {kind.install()}"]
    if kind.torch is not None and not _is_right_torch(kind):
        mend = f"{_PIP} torch" if name == "cuda" else kind.install()
        return [f"torch is installed without {kind.torch[1]}: {mend}"]
    return []


def _is_right_torch(kind: _Kind) -> bool:
    """Whether torch is the build that an accelerator needs, which it says in a file of its own."""
    spec = find_spec("torch")
    if kind.torch is None or spec is None or spec.origin is None:
        return False
    says = re.compile(rf"^{kind.torch[0]}\b.*=\s*['\"]?\d", re.MULTILINE)
    return says.search(_text(Path(spec.origin).with_name("version.py"))) is not None
