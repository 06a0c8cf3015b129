"""The images for accelerators are built like each other, and run like the CPU's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACCELERATORS = ("cuda", "hpu", "neuron", "rocm", "tpu", "xpu")
# Differences between devices: the base, packages, variables of their software, and who may use them.
OWN = re.compile(
    r"^(ARG (BASE|EXTRAS)=.*|# --build-arg EXTRAS=.*|    && apt-get install .*"
    r"|    org.opencontainers.image.description=.*|    [A-Z_]+=.*|WORKDIR /tmp|USER .*)$",
    re.MULTILINE,
)


def dockerfile(device: str) -> str:
    """Without the stage that makes a base, where there is one."""
    text = (ROOT / f"Dockerfile.{device}").read_text()
    return re.sub(r"^FROM .* AS torchneuron\n(.*\n)+?(?=FROM )", "", text, flags=re.MULTILINE)


def instructions(device: str, name: str) -> list[str]:
    """The arguments of each instruction of this name, with its lines joined."""
    text = re.sub(r"^#.*\n", "", dockerfile(device), flags=re.MULTILINE).replace("\\\n", "")
    return [" ".join(found.split()) for found in re.findall(rf"^{name} (.*)$", text, re.MULTILINE)]


def variables(device: str) -> dict[str, str]:
    (words,) = instructions(device, "ENV")
    return dict(word.split("=", 1) for word in words.split())


@pytest.mark.parametrize("device", ACCELERATORS)
def test_they_differ_only_in_what_is_the_devices_own(device: str) -> None:
    def common(text: str) -> list[str]:
        lines = OWN.sub("", text.partition("\nFROM ")[2]).splitlines()
        return [line for line in lines if line and not line.startswith("# ")]

    assert common(dockerfile(device)) == common(dockerfile(ACCELERATORS[0]))


def test_the_base_for_trainium_is_made_with_torch_neuronx() -> None:
    text = (ROOT / "Dockerfile.neuron").read_text()
    assert "\nARG BASE=torchneuron\n" in text
    stage = text.partition(" AS torchneuron\n")[2].partition("\nFROM ")[0]
    for package in ("torch-neuronx==", "neuronx-cc", "aws-neuronx-runtime-lib", "aws-neuronx-collectives"):
        assert package in stage


@pytest.mark.parametrize("device", ACCELERATORS)
def test_they_start_stop_and_are_labelled_like_the_cpus(device: str) -> None:
    for instruction in ("ENTRYPOINT", "EXPOSE"):
        assert instructions(device, instruction) == instructions("cpu", instruction)
    (check,), (cpus,) = instructions(device, "HEALTHCHECK"), instructions("cpu", "HEALTHCHECK")
    assert check.partition(" CMD ")[2] == cpus.partition(" CMD ")[2]
    assert "tini" in next(run for run in instructions(device, "RUN") if "useradd" in run).split()
    (labels,), (cpus,) = instructions(device, "LABEL"), instructions("cpu", "LABEL")
    names = [re.findall(r"([\w.]+)=\"", text) for text in (labels, cpus)]
    assert names[0] == names[1]
    # What a vendor's base starts must not become arguments of the server.
    assert instructions(device, "CMD") == ["[]"]


@pytest.mark.parametrize("device", ACCELERATORS)
def test_they_run_on_their_device_and_keep_what_was_compiled(device: str) -> None:
    environment = variables(device)
    assert environment["TIDEWHEEL_DEVICE"] == device
    (volumes,) = instructions(device, "VOLUME")
    made = re.search(r"install -d -o tidewheel -g tidewheel (.*)$", " ".join(instructions(device, "RUN")))
    assert made is not None
    assert made[1].split()[: len(volumes.split())] == volumes.split()
    caches = [path for value in environment.values() for path in re.findall(r"/var/cache/[^,:]*", value)]
    assert len(caches) > 1
    for path in caches:
        assert path.startswith(tuple(volumes.split())), path


@pytest.mark.parametrize("device", ACCELERATORS)
def test_only_the_tpus_image_runs_as_root(device: str) -> None:
    assert instructions(device, "USER") == ([] if device == "tpu" else ["10001:10001"])


@pytest.mark.parametrize("device", ACCELERATORS)
def test_the_extras_that_they_install_are_locked(device: str) -> None:
    (extras,) = [words.partition("=")[2] for words in instructions(device, "ARG") if words.startswith("EXTRAS=")]
    # A vendor's base brings the framework, so nothing is installed beside it.
    assert extras == {"cuda": "cuda", "tpu": "tpu"}.get(device, "")
    for extra in extras.split():
        assert (ROOT / "requirements" / f"{extra}.txt").exists()


def test_images_on_debian_have_the_same_pinned_base() -> None:
    named = [base for device in ("cpu", *ACCELERATORS) for base in instructions(device, "ARG") if "=debian:" in base]
    (base,) = {*named}
    assert re.fullmatch(r"BASE=debian:trixie-slim@sha256:[0-9a-f]{64}", base)


@pytest.mark.parametrize("device", ACCELERATORS)
def test_what_a_build_runs_reaches_it(device: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    run = {words.split()[0] for words in instructions(device, "RUN") if words.startswith("tools/")}
    assert run == {"tools/image/build.sh"}
    assert run | {"tools/sbom.py", "requirements"} <= allowed
