"""The keystream is ChaCha20, the normals are normal, and both are pure functions of their arguments."""

from __future__ import annotations

from hashlib import sha256
from itertools import combinations, pairwise

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpoptim.kernels.normals import LOG_COEFS, MINUS_2_LN2, ROOT_HALF_BITS, SCRATCH_ROWS, SINE_COEFS, box_muller
from dpoptim.noise import NoiseKey, keystream, uniform_words, words
from dpoptim.noise.normals import _CHUNK
from tests.noise.explicit import normals
from tests.torch_settings import threads

KEY = NoiseKey.from_bytes(bytes(range(32)))
SUBKEY = bytes(range(32))
GOLDEN = ["0x1.03916952d84c8p+1", "0x1.ec2f62874ea47p-1", "0x1.9e196101e68d9p-1", "-0x1.5c9e933042c99p-2"]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def draw(count: int, *, stream: str = "gradient", name: str = "weight", step: int = 0, start: int = 0) -> torch.Tensor:
    return normals(KEY, stream=stream, name=name, step=step, start=start, count=count)


def test_keystream_is_the_block_of_rfc_8439_section_2_3_2() -> None:
    """The nonce 000000090000004a00000000 holds the step in its first 8 bytes, little-endian."""
    step = int.from_bytes(bytes.fromhex("000000090000004a"), "little")
    assert keystream(SUBKEY, step=step, first_block=1, blocks=1).tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_keystream_encrypts_the_text_of_rfc_8439_section_2_4_2() -> None:
    """Two blocks: the counter increases by one from block to block."""
    plaintext = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    step = int.from_bytes(bytes.fromhex("000000000000004a"), "little")
    stream = keystream(SUBKEY, step=step, first_block=1, blocks=2).tobytes()
    cipher = bytes(a ^ b for a, b in zip(plaintext, stream, strict=False))
    assert cipher.hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
        "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
        "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


def test_words_are_little_endian() -> None:
    stream = keystream(SUBKEY, step=5, first_block=0, blocks=1).tobytes()
    expected = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(8)]
    assert words(SUBKEY, step=5, start=0, count=8).tolist() == expected


def test_last_block_is_available_and_the_next_is_refused() -> None:
    assert len(keystream(SUBKEY, step=2**64 - 1, first_block=2**32 - 1, blocks=1)) == 64
    assert len(keystream(SUBKEY, step=0, first_block=2**32, blocks=0)) == 0
    with pytest.raises(ValueError, match="4294967295"):
        keystream(SUBKEY, step=0, first_block=2**32 - 1, blocks=2)
    assert draw(2, start=2**35 - 2).isfinite().all()
    with pytest.raises(ValueError, match="2\\*\\*32"):
        draw(3, start=2**35 - 2)


def test_blocks_far_apart_differ() -> None:
    starts = [0, *(2**power for power in range(32))]
    assert len({keystream(SUBKEY, step=0, first_block=start, blocks=1).tobytes() for start in starts}) == 33


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step"),
        ({"step": 2**64}, "step"),
        ({"start": -1}, "start"),
        ({"count": -1}, "numel"),
        ({"dtype": torch.int64}, "Noise in torch.int64 would reveal"),
        ({"dtype": torch.bfloat16}, "Noise in torch.bfloat16 would reveal"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"stream": "gradient", "name": "weight", "step": 0, "count": 1, **change}
    with pytest.raises(ValueError, match=message):
        normals(KEY, **arguments)  # type: ignore[arg-type]


@given(start=st.integers(0, 60), count=st.integers(0, 60))
@settings(max_examples=40, deadline=None)
def test_every_slice_has_the_bits_of_the_whole(start: int, count: int) -> None:
    assert torch.equal(draw(count, start=start), draw(120)[start : start + count])
    expected = words(SUBKEY, step=0, start=0, count=120)[start : start + count]
    assert np.array_equal(words(SUBKEY, step=0, start=start, count=count), expected)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_splits_over_ranks_have_the_bits_of_the_whole(parts: int) -> None:
    total = 3 * _CHUNK + 1001
    cuts = np.linspace(0, total, parts + 1).astype(int) | 1
    cuts[0], cuts[-1] = 0, total
    shards = [draw(int(b - a), start=int(a)) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(shards), draw(total))


def test_threads_do_not_change_the_bits() -> None:
    total, results = 5 * _CHUNK + 7, []
    for count in (1, 2, 5):
        with threads(count):
            results.append(draw(total))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_order_of_calls_is_irrelevant() -> None:
    forward = {step: draw(9, step=step) for step in range(4)}
    torch.manual_seed(1)
    backward = {step: draw(9, step=step) for step in reversed(range(4))}
    assert all(torch.equal(forward[step], backward[step]) for step in range(4))


def test_global_generators_are_left_alone() -> None:
    state = torch.random.get_rng_state()
    draw(100)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dtypes_and_devices_round_the_same_values_once(dtype: torch.dtype, device: str) -> None:
    made = normals(KEY, stream="g", name="w", step=3, start=1, count=1001, dtype=dtype, device=device)
    assert made.dtype == dtype
    assert torch.equal(made.cpu(), normals(KEY, stream="g", name="w", step=3, start=1, count=1001).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_numpy_and_torch_make_the_same_bits(device: str) -> None:
    raw = words(SUBKEY, step=0, start=0, count=100_002).view(np.int64)
    raw[:8] = [0, 0, -1, -1, 2**63 - 1, -(2**63), 1, 1]
    by_numpy, by_torch = np.empty(len(raw)), torch.empty(len(raw), dtype=torch.float64, device=device)
    box_muller(np, raw, by_numpy, np.empty((SCRATCH_ROWS, len(raw) // 2)))
    scratch = torch.empty(SCRATCH_ROWS, len(raw) // 2, dtype=torch.float64, device=device)
    box_muller(torch, torch.from_numpy(raw).to(device), by_torch, scratch)
    if device == "cpu":  # torch's √ on a CPU may not be correctly rounded
        np.testing.assert_allclose(by_torch.numpy(), by_numpy, rtol=1e-14, atol=1e-15)
    else:
        assert np.array_equal(by_numpy, by_torch.cpu().numpy())


def test_golden_bits() -> None:
    """A resumed run replays the noise of its key, so these bits may never change."""
    bits = [value.hex() for value in draw(4, step=7).tolist()]
    assert bits == GOLDEN


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "digest"),
    [
        (torch.float64, "af2eb5aa806271a601ead7a618ba81903d09e3b1a67d79da161d848de1461870"),
        (torch.float32, "93d0db359bfc2dff971b9d092bb700cb6671f39aa316a72822f29b00b8f4602e"),
    ],
)
def test_golden_digest_of_a_long_vector(dtype: torch.dtype, digest: str, count: int) -> None:
    with threads(count):
        made = normals(KEY, stream="gradient", name="weight", step=7, start=5, count=300_003, dtype=dtype)
    little_endian = made.numpy().astype(made.numpy().dtype.newbyteorder("<"))
    assert sha256(little_endian.tobytes()).hexdigest() == digest


def plain_horner(coefs: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefs[-1])
    for coef in coefs[-2::-1]:
        total = total * x + coef
    return total


def plain_box_muller(raw: np.ndarray) -> np.ndarray:
    """`box_muller` with every scaling where the formula has it, as in the GPU kernel."""
    u = (raw.view(np.uint64)[0::2].astype(np.float64) + 0.5) * 2.0**-64
    bits = u.view(np.int64)
    exponent = (bits - ROOT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).view(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    radius = np.sqrt(exponent * MINUS_2_LN2 + s * plain_horner(LOG_COEFS, s * s))
    x = raw[1::2] * 2.0**-63
    sine = x * plain_horner(SINE_COEFS, x * x)
    square = 1.0 - sine * sine
    sine_half, cosine_half = 2.0 * (sine * np.sqrt(square)), 2.0 * square - 1.0
    cosine = 1.0 - 2.0 * (sine_half * sine_half)
    return np.stack([cosine * radius, 2.0 * (sine_half * cosine_half) * radius], axis=1).ravel()


def test_folded_scalings_do_not_change_bits() -> None:
    ends = [*EDGES, *(2**k + d for k in range(1, 64) for d in (-1, 0, 1)), *(2**64 - 2**k for k in range(64))]
    pairs = [(a, b) for a in ends for b in ends]
    raw = np.concatenate([np.array(pairs, dtype=np.uint64).ravel(), words(SUBKEY, step=2, count=400_000)])
    out = np.empty(len(raw))
    box_muller(np, raw.view(np.int64), out, np.empty((SCRATCH_ROWS, len(raw) // 2)))
    assert np.array_equal(out.view(np.int64), plain_box_muller(raw.view(np.int64)).view(np.int64))


def exact_pair(radius_word: int, angle_word: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    with mpmath.workdps(40):
        radius = mpmath.sqrt(-2 * mpmath.log((radius_word + mpmath.mpf(0.5)) / mpmath.mpf(2) ** 64))
        angle = 2 * mpmath.pi * angle_word / mpmath.mpf(2) ** 64
        return radius * mpmath.cos(angle), radius * mpmath.sin(angle)


EDGES = [
    0,
    1,
    2**32,
    2**53 + 1,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    13043817825332782212,
    2**64 - 2**40,
    2**64 - 1,
]


def test_values_are_exact_up_to_rounding() -> None:
    some = words(SUBKEY, step=1, start=0, count=2000).tolist()
    pairs = list(zip(some[0::2], some[1::2], strict=True)) + [(a, b) for a in EDGES for b in EDGES]
    raw = np.array(pairs, dtype=np.uint64).ravel().view(np.int64)
    out = np.empty(len(raw))
    box_muller(np, raw, out, np.empty((SCRATCH_ROWS, len(raw) // 2)))
    for (radius_word, angle_word), first, second in zip(pairs, out[0::2], out[1::2], strict=True):
        cosine, sine = exact_pair(radius_word, angle_word)
        # Rounding u to float64 moves it by up to 2^-54, and the radius by that over the radius.
        allowed = 1e-14 + min(2.0**-54 / float(mpmath.hypot(cosine, sine)), 2e-8)
        assert abs(first - cosine) <= allowed
        assert abs(second - sine) <= allowed


def test_largest_value() -> None:
    out = np.empty(2)
    box_muller(np, np.zeros(2, dtype=np.int64), out, np.empty((SCRATCH_ROWS, 1)))
    assert out[0] == pytest.approx(np.sqrt(130 * np.log(2)), rel=1e-15)


def test_distinct_across_step_name_stream_and_key() -> None:
    made = [
        draw(64),
        draw(64, step=1),
        draw(64, step=2**32),
        draw(64, name="bias"),
        draw(64, name="weight2"),
        draw(64, stream="square"),
        draw(64, start=64),
        normals(NoiseKey.from_bytes(bytes(32)), stream="gradient", name="weight", step=0, count=64),
    ]
    for a, b in combinations(made, 2):
        assert not torch.isin(a, b).any()


def test_uniform_words_have_their_own_domain() -> None:
    made = uniform_words(KEY, domain="poisson", step=0, count=512)
    assert made.dtype == np.uint64
    assert np.array_equal(made[:100], uniform_words(KEY, domain="poisson", step=0, count=100))
    for other in (
        uniform_words(KEY, domain="shuffle", step=0, count=512),
        uniform_words(KEY, domain="poisson", step=1, count=512),
        words(KEY.subkey("normals/poisson", ""), step=0, start=0, count=512),
        words(KEY.subkey("normals/sampling", "poisson"), step=0, start=0, count=512),
    ):
        assert not np.isin(made, other).any()
    uniform = uniform_words(KEY, domain="poisson", step=2, count=200_000) / 2.0**64
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3


COUNT = 400_000


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return draw(COUNT, step=11).numpy()


def is_standard_normal(values: np.ndarray) -> bool:
    """Kolmogorov–Smirnov, the first four moments, and the number beyond 3 and 4, all within 4 deviations."""
    n = len(values)
    moments = [values.mean(), (values**2).mean() - 1, (values**3).mean(), (values**4).mean() - 3]
    deviations = np.sqrt(np.array([1, 2, 15, 96]) / n)
    tails = [((np.abs(values) > at).mean(), 2 * stats.norm.sf(at)) for at in (3.0, 4.0)]
    return bool(
        stats.kstest(values, "norm").pvalue > 1e-4
        and (np.abs(moments) < 4 * deviations).all()
        and all(abs(found - p) < 4 * np.sqrt(p / n) for found, p in tails)
    )


def test_normals_are_normal(sample: np.ndarray) -> None:
    assert is_standard_normal(sample)
    assert is_standard_normal(sample[0::2])
    assert is_standard_normal(sample[1::2])


@pytest.mark.parametrize("level", [0.99, 1.01])
def test_a_wrong_level_is_rejected(sample: np.ndarray, level: float) -> None:
    assert not is_standard_normal(level * sample)


def test_a_wrong_shape_is_rejected(sample: np.ndarray) -> None:
    assert not is_standard_normal(sample + 0.01)
    uniform = np.random.default_rng(0).random(COUNT)
    assert not is_standard_normal((uniform - 0.5) * np.sqrt(12))
    assert not is_standard_normal(np.clip(sample, -3.5, 3.5))


def are_independent(a: np.ndarray, b: np.ndarray) -> bool:
    """No correlation of the values, of their squares, or of value and square, within 4.5 deviations."""
    bound = 4.5 / np.sqrt(len(a))
    pairs = [(a, b), (a**2, b**2), (a, b**2), (a**2, b), (np.abs(a), np.abs(b))]
    return all(abs(np.corrcoef(x, y)[0, 1]) < bound for x, y in pairs)


def test_independent_across_elements_steps_names_and_streams(sample: np.ndarray) -> None:
    pairs = [
        (sample[0::2], sample[1::2]),
        (sample[:-1], sample[1:]),
        (sample[:-2], sample[2:]),
        (sample[:-8], sample[8:]),
        *((sample, draw(COUNT, step=step).numpy()) for step in (10, 12)),
        (sample, draw(COUNT, step=11, name="bias").numpy()),
        (sample, draw(COUNT, step=11, stream="square").numpy()),
        (sample, draw(COUNT, step=11, start=COUNT).numpy()),
    ]
    for a, b in pairs:
        assert are_independent(a, b)


def test_dependence_is_rejected(sample: np.ndarray) -> None:
    other = draw(COUNT, step=12).numpy()
    assert not are_independent(sample, sample)
    assert not are_independent(sample, 0.02 * sample + other)
    assert not are_independent(sample, np.abs(sample) * np.sign(other))
