"""srt without the kernels, or with a version that it does not work with."""

from importlib import metadata

import pytest

import srt
from srt.errors import SrtError
from srt.test.ci_register import register_cpu_ci
from srt.utils.kernels import check_kernel_version

register_cpu_ci(est_time=2, suite="per-commit")


@pytest.mark.parametrize("version", ["0.4.0", "0.4.7", "0.4.1.dev3"])
def test_kernel_versions_in_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    check_kernel_version()


@pytest.mark.parametrize("version", ["0.3.9", "0.5.0", "1.0"])
def test_kernel_versions_out_of_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(ImportError, match=rf"has version {version}\. Run: make -C sgl-kernel-cpu"):
        check_kernel_version()


def test_kernel_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    message = r">=0\.4\.0,<0\.5\.0.* is not installed\. Run: make -C sgl-kernel-cpu"
    for error in (ImportError, SrtError, srt.KernelVersionError):
        with pytest.raises(error, match=message):
            _ = srt.Engine
