"""The wheel that `pip install .` builds."""

import subprocess
import sys
import zipfile

import pytest


@pytest.mark.long
def test_the_wheel_holds_what_an_installation_needs(repository, tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), "."]
    subprocess.run(command, cwd=repository, check=True)
    (wheel,) = tmp_path.glob("tracekit_rl-*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "tracekit=tracekit.cli:main" in archive.read(entry_points).decode().replace(" ", "")
    source = repository / "python"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert modules - names == set()
    assert {"tracekit/config/quickstart.toml", "tracekit/py.typed", "tracekit/_core.abi3.so"} <= names
    assert not [name for name in names if name.startswith(("kernels/", "tests/", "configs/"))]
