"""Wheels, source distributions and editable installs have the whole package, though it is linked together here.

The native module is left out (`wheel.cmake=false`): what is asked is which Python files come along. A build takes some
seconds. What `make test` checks is that the installed package has the files of the sources (test_install.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A wheel without a native module is for every Python.
SETTINGS = ("--config-settings=wheel.cmake=false", "--config-settings=wheel.py-api=py3")
SEARCHED = (
    "import json, sys, tidewheel.server.demo, tidewheel.engine.errors as e; print(json.dumps([e.__file__, sys.path]))"
)

# The licences of Tidewheel and of the libraries in the web page.
LICENCES = {"LICENSE", *(f"tidewheel/server/web/vendor/{name}/LICENSE.txt" for name in ("highlight", "katex"))}

pytest.importorskip("scikit_build_core")
pytestmark = pytest.mark.sweep


def pip(*arguments: str | Path) -> None:
    options = ["--quiet", "--no-input", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *map(str, arguments[:1]), *options, *map(str, arguments[1:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def in_repository() -> set[str]:
    """The package's files, as a wheel has them."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, "tidewheel", "server", "engine"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no repository: it would say which files are sources")
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    return {name if name.startswith("tidewheel/") else f"tidewheel/{name}" for name in files}


def in_wheel(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    assert {found[1] for name in names if (found := re.match(r"[^/]*\.dist-info/licenses/(.*)", name))} == LICENCES
    return {name for name in names if name.startswith("tidewheel/")}


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_a_wheel_has_what_the_links_lead_to(tmp_path: Path) -> None:
    pip("wheel", *SETTINGS, "--wheel-dir", tmp_path, ROOT)
    assert in_wheel(tmp_path) == in_repository()


def test_a_source_distribution_has_each_file_once(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    assert len(names) == len(set(names))
    assert {name for name in names if name.startswith("tidewheel/")} == in_repository()
    assert not [name for name in names if name.startswith(("server/", "engine/"))]
    assert set(names) >= LICENCES
    assert {"CMakeLists.txt", "native/bindings.cpp", "pyproject.toml", "README.md"} <= set(names)


def test_a_wheel_of_a_source_distribution_is_the_same(source_distribution: Path, tmp_path: Path) -> None:
    pip("wheel", *SETTINGS, "--wheel-dir", tmp_path, source_distribution)
    assert in_wheel(tmp_path) == in_repository()


def test_an_editable_install_reads_the_sources(tmp_path: Path) -> None:
    pip("install", *SETTINGS, "--target", tmp_path, "--editable", ROOT)
    # A folder's .pth files are read only where it is a site folder.
    program = f"import site; site.addsitedir({str(tmp_path)!r}); {SEARCHED}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        cwd="/",
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    file, path = json.loads(done.stdout)
    assert Path(file).resolve() == ROOT / "engine" / "errors.py"
    assert str(ROOT.parent) not in path
