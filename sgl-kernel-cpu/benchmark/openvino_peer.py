"""OpenVINO with int8-compressed and with float32 weights."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
from environment import all_allowed_cpus
from method import Activations
from openvino import opset13
from ours import Weights

# A compiled model holds its own repacked weight and takes a while to make.
_MOST_COPIES = 16

_Run = Callable[[Activations, int], object]


def _model(k: int, weight: Any) -> ov.Model:
    x = opset13.parameter([-1, k], ov.Type.f32)
    return ov.Model([opset13.matmul(x, weight, False, True)], [x])


def _int8(codes: np.ndarray, scales: np.ndarray) -> Any:
    # The form in which compressed checkpoints hold weights; the plugin multiplies by int8 as it is.
    weight = opset13.convert(opset13.constant(codes), ov.Type.f32)
    return opset13.multiply(weight, opset13.constant(scales[:, None]))


def openvino_methods(
    weights: Weights, exact: np.ndarray, codes: np.ndarray, scales: np.ndarray, threads: int
) -> list[tuple[str, int, _Run]]:
    """Name, bytes of the weight, and call of each."""
    core = ov.Core()
    config: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        # The plugin would still choose by the processor, and then find no primitive for bf16 sums
        # or int8 activations.
        config |= {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    k = weights.shape.k

    def requests(make: Callable[[], ov.Model], nbytes: int, **more: str) -> list[Any]:
        count = max(1, min(_MOST_COPIES, -(-weights.rotated_bytes // nbytes)))
        found = []
        with all_allowed_cpus():
            for _ in range(count):
                request = core.compile_model(make(), "CPU", config | more).create_infer_request()
                request.infer([np.zeros((1, k), np.float32)], share_inputs=True)
                found.append(request)
        return found

    def runner(of: list[Any]) -> _Run:
        def run(x: Activations, i: int) -> object:
            return of[i % len(of)].infer([x.numpy], share_inputs=True, share_outputs=True)[0]

        return run

    int8 = requests(lambda: _model(k, _int8(codes, scales)), codes.nbytes)
    f32 = requests(
        lambda: _model(k, opset13.constant(exact)), exact.nbytes, INFERENCE_PRECISION_HINT="f32"
    )
    return [
        ("openvino int8", codes.nbytes + scales.nbytes, runner(int8)),
        ("openvino f32", exact.nbytes, runner(f32)),
    ]
