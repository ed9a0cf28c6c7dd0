"""The linear layer's bench, driven with the real kernels."""

from kvferry.bench.kernels import gemm_speed, make_layers, step_seconds
from kvferry.engine.kernels.layout import WEIGHTS_Q4, WEIGHTS_Q8


def test_layers_lie_one_behind_the_other_as_prefetching_expects() -> None:
    first, second = make_layers([(WEIGHTS_Q4, (64, 32)), (WEIGHTS_Q8, (32, 64))])
    assert first.weights.ctypes.data + first.weights.nbytes == second.weights.ctypes.data
    assert (first.weights.nbytes, second.weights.nbytes) == (2 * 32 * 20, 64 * 34)


def test_a_time_for_each_number_of_rows_and_a_speed() -> None:
    assert all(seconds > 0 for seconds in step_seconds(WEIGHTS_Q4, (1, 9)))
    assert gemm_speed(WEIGHTS_Q4, 64, 32) > 0
