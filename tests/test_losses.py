"""Losses against golden vectors, gradients against finite differences, and the whole against the sum of its parts."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from raypipe.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TIS,
    add_metrics,
    cispo,
    count,
    entropy,
    gspo,
    k3,
    log_ratio,
    mean_metrics,
    ppo_clip,
    sequence_mask,
    sequence_mean,
    tally,
    token_weights,
    value_loss,
    weighted_sum,
)

CASES = json.loads((Path(__file__).parent / "cases" / "algorithms.json").read_text())
DTYPES = [torch.float32, torch.float64]


def golden(*kinds):
    """Parametrizes over the golden cases of these kinds, in float32 and float64."""
    cases = [case for case in CASES if case["kind"] in kinds]
    assert cases
    params = [
        pytest.param(case, dtype, id=f"{case['id']}-{case['kind']}-{str(dtype)[6:]}")
        for case in cases
        for dtype in DTYPES
    ]
    return pytest.mark.parametrize(("case", "dtype"), params)


def check(case, dtype, **actual):
    """Every actual value equals the case's expected value, to 1e-5 in float32 and the case's tolerance in float64."""
    tolerance = case["tolerance"] if dtype == torch.float64 else 1e-5
    for key, value in actual.items():
        expected = torch.tensor(case["expected"][key], dtype=torch.float64)
        torch.testing.assert_close(torch.as_tensor(value).double(), expected, rtol=tolerance, atol=tolerance)
    assert actual.keys() == case["expected"].keys()


def tensors(case, dtype, *keys):
    return [torch.tensor(case["inputs"][key], dtype=dtype) for key in keys]


def mean_weights(mask_BT, mode="token_mean", **options):
    """The weights of a batch that is the whole mini-batch."""
    return token_weights(mask_BT, mode, count(mask_BT, mode), **options)


# -- golden vectors ----------------------------------------------------------------------------------------------------


@golden("aggregate")
def test_aggregation_golden(case, dtype):
    (losses_BT,) = tensors(case, dtype, "token_losses")
    mask_BT = torch.tensor(case["inputs"]["mask"]).bool()
    actual = {
        mode: weighted_sum(losses_BT, mean_weights(mask_BT, mode, max_length=case["inputs"]["constant"]))
        for mode in AGGREGATIONS
    }
    names = {"dr_grpo": "constant"}
    check(case, dtype, **{names.get(mode, mode.replace("_", "-")): value for mode, value in actual.items()})


@golden("ppo_clip", "dual_clip", "clip_higher", "tis_loss")
def test_ppo_clip_golden(case, dtype):
    inputs = case["inputs"]
    logprobs_BT, old_BT, advantages_BT = tensors(case, dtype, "new_logprobs", "old_logprobs", "advantages")
    mask_BT = torch.tensor(inputs["mask"]).bool()
    weights_BT = mean_weights(mask_BT)
    if case["kind"] == "tis_loss":
        train_BT, rollout_BT = tensors(case, dtype, "train_logprobs", "rollout_logprobs")
        weights_BT = weights_BT * TIS["token"](train_BT, rollout_BT, mask_BT, inputs["cap"])[0]
    loss, metrics = ppo_clip(
        logprobs_BT,
        old_BT,
        advantages_BT,
        mask_BT,
        weights_BT,
        clip_low=inputs["clip_low"],
        clip_high=inputs["clip_high"],
        dual_clip=inputs.get("dual_clip_c", math.inf),
    )
    means = mean_metrics(metrics)
    actual = {"loss": loss, "clip_fraction": means["clip_frac"], "approx_kl": means["approx_kl"]}
    if case["kind"] == "dual_clip":
        actual["clip_fraction_lower"] = means["clip_frac_lower"]
    check(case, dtype, **actual)


@golden("gspo")
def test_gspo_golden(case, dtype):
    inputs = case["inputs"]
    logprobs_BT, old_BT, advantages_BT = tensors(case, dtype, "new_logprobs", "old_logprobs", "advantages")
    mask_BT = torch.tensor(inputs["mask"]).bool()
    loss, _ = gspo(
        logprobs_BT,
        old_BT,
        advantages_BT,
        mask_BT,
        mean_weights(mask_BT, "seq_mean_token_mean"),
        clip_low=inputs["clip_low"],
        clip_high=inputs["clip_high"],
    )
    ratio_B = sequence_mean(log_ratio(logprobs_BT, old_BT, mask_BT), mask_BT).exp()[:, 0]
    check(case, dtype, loss=loss, sequence_ratio=ratio_B)


@golden("cispo")
def test_cispo_golden(case, dtype):
    inputs = case["inputs"]
    logprobs_BT, old_BT, advantages_BT = tensors(case, dtype, "new_logprobs", "old_logprobs", "advantages")
    logprobs_BT.requires_grad_()
    mask_BT = torch.tensor(inputs["mask"]).bool()
    loss, metrics = cispo(
        logprobs_BT,
        old_BT,
        advantages_BT,
        mask_BT,
        mean_weights(mask_BT),
        clip_low=inputs["clip_low"],
        clip_high=inputs["clip_high"],
    )
    loss.backward()
    weights_BT = -logprobs_BT.grad * 3 / advantages_BT  # gradient = -weight * A / 3 tokens
    check(
        case,
        dtype,
        loss=loss.detach(),
        grad_wrt_new_logprob=logprobs_BT.grad,
        weights=weights_BT,
        clip_fraction=mean_metrics(metrics)["clip_frac"],
    )


@golden("value_clip")
def test_value_loss_golden(case, dtype):
    values_BT, old_BT, returns_BT = tensors(case, dtype, "value_preds", "old_values", "returns")
    mask_BT = torch.tensor(case["inputs"]["mask"]).bool()
    loss, metrics = value_loss(
        values_BT, old_BT, returns_BT, mask_BT, mean_weights(mask_BT), clip_range=case["inputs"]["clip_range"]
    )
    check(case, dtype, loss=loss, clip_fraction=mean_metrics(metrics)["clip_frac"])


@golden("entropy")
def test_entropy_golden(case, dtype):
    (logits_BTV,) = tensors(case, dtype, "logits")
    mask_BT = torch.tensor(case["inputs"]["mask"]).bool()
    entropy_BT = entropy(logits_BTV)
    check(case, dtype, per_token=entropy_BT, mean=weighted_sum(entropy_BT, mean_weights(mask_BT)))


@golden("kl")
def test_kl_golden(case, dtype):
    logprobs_BT, ref_BT = tensors(case, dtype, "logprobs", "ref_logprobs")
    d_BT = log_ratio(logprobs_BT, ref_BT, torch.ones_like(ref_BT, dtype=torch.bool))
    check(case, dtype, **{name: estimator(d_BT) for name, estimator in KL_ESTIMATORS.items()})


@golden("tis_token", "tis_sequence")
def test_importance_weights_golden(case, dtype):
    train_BT, rollout_BT = tensors(case, dtype, "train_logprobs", "rollout_logprobs")
    mask_BT = torch.tensor(case["inputs"]["mask"]).bool()
    tis = TIS[case["kind"].removeprefix("tis_")]
    weights_BT, metrics = tis(train_BT, rollout_BT, mask_BT, case["inputs"]["cap"])
    raw_BT, _ = tis(train_BT, rollout_BT, mask_BT, math.inf)
    truncated = mean_metrics(metrics)["tis_truncated_frac"]
    check(case, dtype, weights=weights_BT, raw=raw_BT, truncated_fraction=truncated)


def test_every_golden_kind_is_tested():
    here = {"aggregate", "ppo_clip", "dual_clip", "clip_higher", "tis_loss", "gspo", "cispo", "value_clip", "entropy"}
    here |= {"kl", "tis_token", "tis_sequence"}
    advantages = {"gae", "reinforce_pp", "grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"}
    assert {case["kind"] for case in CASES} == here | advantages | {"adaptive_kl", "overlong_penalty"}


# -- a batch of eight, in whole and in parts ---------------------------------------------------------------------------


def random_batch(seed=0, n=8, width=7):
    """Log-probs, old log-probs, advantages, values, ... of n samples; lengths differ, one is empty, one has a gap."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale=1.0):
        return scale * torch.randn(n, width, generator=generator, dtype=torch.float64)

    lengths_B1 = torch.randint(1, width + 1, (n, 1), generator=generator)
    lengths_B1[2], lengths_B1[5] = 0, width
    mask_BT = torch.arange(width) < lengths_B1
    mask_BT[5, 2:4] = False
    old_BT = draw() - 2
    return {
        "logprobs": old_BT + draw(0.3),
        "old": old_BT,
        "engine": old_BT + draw(0.3),
        "advantages": draw().mean(1, keepdim=True).expand(n, width).contiguous(),
        "values": draw(),
        "old_values": draw(),
        "returns": draw(),
        "mask": mask_BT,
    }


def policy_terms(policy_loss, tis):
    """A complete policy loss as a learner builds it: surrogate with importance weights, KL and entropy-like terms."""

    def terms(batch, x_BT, weights_BT):
        tis_BT, tis_metrics = tis(batch["old"], batch["engine"], batch["mask"], 1.3)
        loss, metrics = policy_loss(
            x_BT, batch["old"], batch["advantages"], batch["mask"], weights_BT * tis_BT, clip_low=0.2, clip_high=0.28
        )
        kl_BT = k3(log_ratio(x_BT, batch["engine"], batch["mask"]))
        loss = loss + 0.1 * weighted_sum(kl_BT, weights_BT)
        return loss, {**metrics, **tis_metrics, "kl": tally(kl_BT, batch["mask"])}

    return terms


def value_terms(batch, x_BT, weights_BT):
    return value_loss(x_BT, batch["old_values"], batch["returns"], batch["mask"], weights_BT, clip_range=0.2)


LOSSES = {
    "ppo_clip": ("logprobs", policy_terms(ppo_clip, TIS["token"])),
    "dual_clip": ("logprobs", policy_terms(functools.partial(ppo_clip, dual_clip=1.5), TIS["sequence"])),
    "gspo": ("logprobs", policy_terms(gspo, TIS["sequence"])),
    "cispo": ("logprobs", policy_terms(cispo, TIS["token"])),
    "value": ("values", value_terms),
}


def loss_and_gradient(batch, key, terms, weights_BT):
    x_BT = batch[key].clone().requires_grad_()
    loss, metrics = terms(batch, x_BT, weights_BT)
    (gradient_BT,) = torch.autograd.grad(loss, x_BT)
    return loss.detach(), gradient_BT, metrics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_one_batch_of_8_equals_micro_batches_and_ranks(name, mode, dtype):
    """Two micro-batches of 4, each cut to its own longest response, or rows dealt to 3 ranks, one of them idle."""
    key, terms = LOSSES[name]
    batch = {k: v if v.dtype == torch.bool else v.to(dtype) for k, v in random_batch().items()}
    denominator = count(batch["mask"], mode)
    whole, gradient_BT, metrics = loss_and_gradient(
        batch, key, terms, token_weights(batch["mask"], mode, denominator, max_length=7)
    )
    assert gradient_BT.abs().sum() > 0
    nothing = [0]  # an idle rank feeds any row with weight and mask 0
    for parts in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 3, 5, 7], [0, 2, 4, 6], nothing]):
        total, part_metrics = torch.zeros((), dtype=torch.float64), []
        assembled_BT = torch.zeros_like(gradient_BT)
        counted = 0
        for rows in parts:
            part = {k: v[rows] for k, v in batch.items()}
            if rows is nothing:
                part["mask"] = torch.zeros_like(part["mask"])
            positions = part["mask"].any(0).nonzero()
            width = int(positions.max()) + 1 if len(positions) else 1
            part = {k: v[:, :width] for k, v in part.items()}
            counted += count(part["mask"], mode)
            weights_BT = token_weights(part["mask"], mode, denominator, max_length=7)
            loss, part_gradient_BT, some_metrics = loss_and_gradient(part, key, terms, weights_BT)
            total += loss
            part_metrics.append(some_metrics)
            assembled_BT[rows, :width] += part_gradient_BT
        assert counted == denominator
        tolerance = 1e-14 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(total, whole.double(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(assembled_BT, gradient_BT, rtol=tolerance, atol=tolerance)
        added = add_metrics(part_metrics)
        assert added.keys() == metrics.keys()
        for metric, pair in metrics.items():
            torch.testing.assert_close(added[metric], pair, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_denominator_can_be_applied_at_the_step(name):
    key, terms = LOSSES[name]
    batch = random_batch()
    n_tokens = count(batch["mask"], "token_mean")
    _, gradient_BT, _ = loss_and_gradient(batch, key, terms, token_weights(batch["mask"], "token_mean", n_tokens))
    _, summed_BT, _ = loss_and_gradient(batch, key, terms, token_weights(batch["mask"], "token_mean", 1))
    torch.testing.assert_close(summed_BT / n_tokens, gradient_BT, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_outside_the_mask_is_never_read(name):
    key, terms = LOSSES[name]
    batch = random_batch()
    weights_BT = mean_weights(batch["mask"], "seq_mean_token_mean")
    loss, gradient_BT, metrics = loss_and_gradient(batch, key, terms, weights_BT)
    assert (gradient_BT[~batch["mask"]] == 0).all()
    for garbage in (math.nan, -math.inf, 1e30):
        dirty = {k: v if k == "mask" else v.masked_fill(~batch["mask"], garbage) for k, v in batch.items()}
        dirty_loss, dirty_gradient_BT, dirty_metrics = loss_and_gradient(dirty, key, terms, weights_BT)
        assert torch.equal(dirty_loss, loss) and torch.equal(dirty_gradient_BT, gradient_BT)
        assert all(torch.equal(dirty_metrics[metric], pair) for metric, pair in metrics.items())


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "value"])
def test_gradient_equals_finite_differences(name, mode):
    # The random ratios lie on both sides of the clips and none within 1e-6 of a kink, where no gradient exists.
    key, terms = LOSSES[name]
    batch = random_batch(seed=1)
    weights_BT = mean_weights(batch["mask"], mode, max_length=7)
    _, metrics = terms(batch, batch[key], weights_BT)
    assert 0 < mean_metrics(metrics)["clip_frac"] < 1
    torch.autograd.gradcheck(lambda x_BT: terms(batch, x_BT, weights_BT)[0], batch[key].clone().requires_grad_())


def test_cispo_gradient_equals_finite_differences_at_a_fixed_ratio():
    # The ratio is detached, so old log-probs that move along with the new ones hold it where it is.
    batch = random_batch(seed=1)
    gap_BT = (batch["logprobs"] - batch["old"]).detach()
    weights_BT = mean_weights(batch["mask"])

    def loss(x_BT):
        return cispo(
            x_BT, x_BT.detach() - gap_BT, batch["advantages"], batch["mask"], weights_BT, clip_low=0.2, clip_high=0.28
        )[0]

    torch.autograd.gradcheck(loss, batch["logprobs"].clone().requires_grad_())


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_gradient_equals_finite_differences(name):
    batch = random_batch()
    weights_BT = mean_weights(batch["mask"])
    torch.autograd.gradcheck(
        lambda x_BT: weighted_sum(KL_ESTIMATORS[name](log_ratio(x_BT, batch["old"], batch["mask"])), weights_BT),
        batch["logprobs"].clone().requires_grad_(),
    )


def test_entropy_gradient_equals_finite_differences():
    logits_BTV = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.autograd.gradcheck(entropy, logits_BTV)


def test_entropy_ignores_tokens_that_are_ruled_out():
    logits_V = torch.tensor([1.0, 1.0, -math.inf]).requires_grad_()
    value = entropy(logits_V)
    value.backward()
    assert value.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits_V.grad, torch.zeros(3))


@pytest.mark.parametrize("name", TIS)
def test_importance_weights_carry_no_gradient(name):
    batch = random_batch()
    weights_BT, _ = TIS[name](batch["logprobs"].requires_grad_(), batch["engine"], batch["mask"], 2.0)
    assert not weights_BT.requires_grad and (weights_BT[~batch["mask"]] == 0).all()


# -- worked by hand ----------------------------------------------------------------------------------------------------


def one_token(policy_loss, log_ratio_, advantage, **options):
    """Loss and gradient of one token with old log-prob -1."""
    logprobs_BT = torch.tensor([[-1.0 + log_ratio_]], requires_grad=True)
    mask_BT = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = policy_loss(
        logprobs_BT, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), mask_BT, mean_weights(mask_BT), **options
    )
    loss.backward()
    return loss.item(), logprobs_BT.grad.item(), mean_metrics(metrics)


def test_ppo_clip_by_hand():
    clips = {"clip_low": 0.2, "clip_high": 0.4}
    half, double = math.log(0.5), math.log(2.0)
    # A = 1, r = 2: max(-2, -1.4), clipped, no gradient.      A = 1, r = 0.5: max(-0.5, -0.8), gradient -A r.
    # A = -1, r = 0.5: max(0.5, 0.8), clipped, no gradient.   A = -1, r = 2: max(2, 1.4), gradient -A r.
    for log_r, advantage, loss, gradient, clipped in [
        (double, 1.0, -1.4, 0.0, 1.0),
        (half, 1.0, -0.5, -0.5, 0.0),
        (half, -1.0, 0.8, 0.0, 1.0),
        (double, -1.0, 2.0, 2.0, 0.0),
    ]:
        actual_loss, actual_gradient, metrics = one_token(ppo_clip, log_r, advantage, **clips)
        assert (actual_loss, actual_gradient) == pytest.approx((loss, gradient), abs=1e-6)
        assert metrics["clip_frac"] == clipped and metrics["clip_frac_lower"] == 0
        assert metrics["approx_kl"] == pytest.approx(-log_r, abs=1e-6)
    # Dual clip 1.5 caps the last one: 1.5, without gradient.
    loss, gradient, metrics = one_token(ppo_clip, double, -1.0, dual_clip=1.5, **clips)
    assert (loss, gradient, metrics["clip_frac_lower"]) == pytest.approx((1.5, 0.0, 1.0))


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES.values())
@pytest.mark.parametrize("log_r", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_ratio_beyond_float32_stays_finite(policy_loss, log_r, advantage):
    loss, gradient, _ = one_token(policy_loss, log_r, advantage, clip_low=0.2, clip_high=0.2)
    assert math.isfinite(loss) and math.isfinite(gradient)
    if advantage == 0:
        assert loss == 0 and gradient == 0


def test_value_loss_without_clip_is_half_the_squared_error():
    # (1 - 1.2)^2 / 2 = 0.02 and gradient v - R = -0.2; a clip of 0.2 about 0.5 gives (0.7 - 1.2)^2 / 2 and no gradient.
    mask_BT = torch.ones(1, 1, dtype=torch.bool)
    for clip_range, loss, gradient, clipped in [(math.inf, 0.02, -0.2, 0), (0.2, 0.125, 0.0, 1)]:
        values_BT = torch.tensor([[1.0]], requires_grad=True)
        actual, metrics = value_loss(
            values_BT,
            torch.tensor([[0.5]]),
            torch.tensor([[1.2]]),
            mask_BT,
            mean_weights(mask_BT),
            clip_range=clip_range,
        )
        actual.backward()
        assert (actual.item(), values_BT.grad.item()) == pytest.approx((loss, gradient), abs=1e-6)
        assert mean_metrics(metrics)["clip_frac"] == clipped


def test_k3_keeps_small_differences_and_clamps_only_when_asked():
    # d = 1e-4: d^2 / 2 - d^3 / 6 = 4.99983e-9, which exp(-d) + d - 1 in float32 rounds to 0 or 1.2e-7.
    d_BT = torch.tensor([[1e-4, -30.0]])
    small, large = k3(d_BT)[0].tolist()
    assert small == pytest.approx(4.99983e-9, rel=1e-2)
    assert large == pytest.approx(math.exp(30) - 31, rel=1e-5)
    assert k3(d_BT, clamp=10.0)[0, 1] == 10.0


def test_a_mini_batch_that_is_all_masked_has_loss_and_gradient_zero():
    batch = random_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    for key, terms in LOSSES.values():
        for mode in AGGREGATIONS:
            weights_BT = mean_weights(batch["mask"], mode, max_length=7)
            loss, gradient_BT, metrics = loss_and_gradient(batch, key, terms, weights_BT)
            assert loss == 0 and (gradient_BT == 0).all()
            assert math.isnan(mean_metrics(metrics)["clip_frac"])


def test_sequence_mask_by_hand():
    # Log-ratios and geometric means: (0, 1, -0.5): e^(1/6) = 1.18; (0.02, -0.02): 1; (0.3, -0.1 masked): e^0.3 = 1.35;
    # (-8, 8): 1, but one token's ratio is e^-8 = 3.4e-4; no token: kept, and not counted.
    differences = [[0.0, 1.0, -0.5], [0.02, -0.02, math.nan], [0.3, -0.1, 0.0], [-8.0, 8.0, 0.0], [5.0, 5.0, 5.0]]
    mask_BT = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    engine_BT = torch.full((5, 3), -2.0)
    logprobs_BT = engine_BT + torch.tensor(differences)
    for low, high, token_low, kept in [
        (0.9, 1.1, 0.0, [1, 3]),
        (0.9, 1.1, 1e-3, [1]),
        (0.9, 1.2, 0.0, [0, 1, 3]),
        (1.1, 1.2, 0.0, [0]),
        (1.1, 2.0, 0.0, [0, 2]),
    ]:
        kept_BT, metrics = sequence_mask(logprobs_BT, engine_BT, mask_BT, low=low, high=high, token_low=token_low)
        assert kept_BT.any(1).nonzero()[:, 0].tolist() == kept
        assert torch.equal(kept_BT[kept], mask_BT[kept])
        assert metrics["masked_frac"].tolist() == [4 - len(kept), 4]


def test_token_weights_refuse_what_they_cannot_mean():
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="'token-mean' is not one of token_mean"):
        token_weights(mask_BT, "token-mean", 2)
    with pytest.raises(ValueError, match="max_length"):
        token_weights(mask_BT, "dr_grpo", 1)


def test_count_is_what_the_mean_is_over():
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    assert [count(mask_BT, mode) for mode in AGGREGATIONS] == [4, 2, 2, 2]
