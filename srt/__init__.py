"""SGLang's CPU runtime: FP8 checkpoints run as they are, on any CPU.

from srt import Engine, SamplingParams

with Engine("path/to/checkpoint") as engine:
    print(engine.generate("The capital of France is", SamplingParams(temperature=0)).text)
"""

# Next to nothing is imported here: the command `srt` passes through before it can answer signals
# (`srt/__main__.py`).
from srt.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from srt.configs.engine_config import EngineConfig
    from srt.entrypoints.engine import Engine
    from srt.errors import KernelVersionError
    from srt.sampling.sampling_params import SamplingParams

__all__ = ["Engine", "EngineConfig", "KernelVersionError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from srt.utils.kernels import check_kernel_version

        check_kernel_version()
        from srt.entrypoints.engine import Engine

        return Engine
    if name == "EngineConfig":
        from srt.configs.engine_config import EngineConfig

        return EngineConfig
    if name == "SamplingParams":
        from srt.sampling.sampling_params import SamplingParams

        return SamplingParams
    if name == "KernelVersionError":
        from srt.errors import KernelVersionError

        return KernelVersionError
    raise AttributeError(f"module 'srt' has no attribute {name!r}")
