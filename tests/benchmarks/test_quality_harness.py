"""The harness of the quality benchmarks: its samples, its models, its loss curves and its lock-step runs."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

QUALITY = Path(__file__).resolve().parents[2] / "benchmarks" / "quality"
sys.path.insert(0, str(QUALITY))
import run as quality  # noqa: E402
import sequential  # noqa: E402
from pictures import END, PAD, SIDE, Scenes  # noqa: E402
from sequential import Conditions, SequentialRun, Stepper, run_data_parallel  # noqa: E402
from subjects import HELD_OUT_SEED, build_subject, summary  # noqa: E402
from teacher import Network, Questions  # noqa: E402

from skerry.config import Config, from_mapping, tomllib  # noqa: E402
from skerry.errors import ConfigError  # noqa: E402
from skerry.tensors.merge import FragmentState, nesterov  # noqa: E402
from skerry.tensors.merge import merge as merge_fragment  # noqa: E402
from skerry.train.island import COLD_STEPS  # noqa: E402
from skerry.train.job import build_optimizers  # noqa: E402

CPU = torch.device("cpu")
PICTURES = ["glyphs", "captions"]
DRAWN = [*PICTURES, "teacher"]


def arm(
    subject: str, steps: int = 12, conditions: dict[str, Any] | None = None, curve: int = 0, **settings: Any
) -> quality.Arm:
    """A tiny run of two islands; further settings as dotted names with __ for the dots."""
    matrix: dict[str, Any] = {
        "subject": subject,
        "curve": curve,
        "base": {
            "model": {"layers": 1, "width": 32, "heads": 2},
            "train": {"batch": 4, "lr": 3e-3, "warmup": 0.0},
            "sync": {"fragments": 3, "every": 3, "overlap": 1},
            "islands": {"count": 2},
        },
        "arm": [{"name": "it", "conditions": conditions or {}, "set": {k.replace("__", "."): v for k, v in settings.items()}}],
    }
    (found,) = quality.arms(matrix)
    sample = found.config.model.context
    tokens = dataclasses.replace(found.config.train, tokens=steps * 8 * sample)
    evaluated = dataclasses.replace(found.config.eval, tokens=64 * sample, final_tokens=64 * sample)
    return dataclasses.replace(found, config=dataclasses.replace(found.config, train=tokens, eval=evaluated))


def stepper_for(arm: quality.Arm) -> Stepper:
    return Stepper(arm.config, build_subject(arm.subject, arm.config, CPU), CPU, arm.batch)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", DRAWN)
def test_a_sample_is_the_same_in_whatever_batch_it_is_read(name: str) -> None:
    draw = build_subject(name, arm(name).config, CPU).samples(3)
    whole = draw(1000, 37)
    parts = [draw(1000, 5), draw(1005, 1), draw(1006, 31)]
    for index in (0, 1):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))


def test_text_samples_are_those_that_a_run_trains_on(tmp_path: Path) -> None:
    from skerry.data.corpus import load_corpus
    from skerry.data.windows import Windows

    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"file {number} of a small corpus\n" * 20)
    data = {"corpus": "folder", "path": str(tmp_path)}
    config: Config = from_mapping(Config, {"data": data, "model": {"context": 16}})
    ours = build_subject("text", config, CPU).samples(5)(7, 9)
    theirs = Windows(load_corpus(config.data, 16).train, 16, 5).batch(7, 9)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("name", DRAWN)
def test_held_out_samples_and_those_of_other_seeds_are_different_ones(name: str) -> None:
    subject = build_subject(name, arm(name).config, CPU)
    held_out, _ = subject._source.batch(HELD_OUT_SEED, 0, 64)
    for seed in (0, 1, 2):
        images, _ = subject.samples(seed)(0, 64)
        distances = torch.cdist(images.flatten(1), held_out.flatten(1))
        assert distances.min() > 1.0, f"seed {seed}"
    with pytest.raises(ConfigError, match="train.seed must be >= 0, got -1"):
        subject.samples(HELD_OUT_SEED)


@pytest.mark.parametrize("name", DRAWN)
def test_samples_have_the_shapes_that_are_promised(name: str) -> None:
    subject = build_subject(name, arm(name).config, CPU)
    x, y = subject.samples(0)(0, 6)
    assert (x.shape, x.dtype) == ((6, *subject.sample.x_shape), subject.sample.x_dtype)
    assert (y.shape, y.dtype) == ((6, *subject.sample.y_shape), subject.sample.y_dtype)


def test_answers_are_drawn_as_the_teacher_thinks_likely_and_nobody_does_better() -> None:
    questions = Questions(CPU)
    x, y = questions.batch(0, 0, 20_000)
    likely = questions.teacher.logits(x).softmax(-1)
    drawn = torch.nn.functional.one_hot(y, likely.shape[1]).float()
    for among in (likely[:, 0] > likely[:, 0].median(), likely[:, 0] <= likely[:, 0].median()):
        assert torch.allclose(drawn[among].mean(0), likely[among].mean(0), atol=0.02)
    assert questions.above_the_teacher(questions.teacher, x).abs().max() < 1e-5
    learner = Network(1)
    above = questions.above_the_teacher(learner, x)
    assert above.min() > -1e-5
    expected = learner(x, y) - questions.teacher(x, y)
    assert above.mean().item() == pytest.approx(expected.item(), abs=0.03)


def test_a_caption_names_the_colour_that_is_in_the_picture() -> None:
    images, captions = Scenes(CPU).batch(0, 0, 400)
    colours = torch.tensor(list(Scenes._COLOURS.values())) * 2 - 1
    middle = images[:, :, SIDE // 2 - 1 : SIDE // 2 + 1, SIDE // 2 - 1 : SIDE // 2 + 1].mean((2, 3))
    seen = torch.cdist(middle, colours).argmin(1)
    right = []
    for row, nearest in zip(captions, seen, strict=True):
        text, _, padding = bytes(row.tolist()).partition(bytes([END]))
        assert set(padding) <= {PAD} and PAD not in text
        assert 3 <= len(re.split(", | and ", text.decode())) <= 4
        named = re.search(r"(\w+) (?:circle|disc|square|box) (?:middle|centre)", text.decode())
        if named:
            right.append(named[1] == list(Scenes._COLOURS)[nearest])
    assert len(right) > 15 and sum(right) >= 0.9 * len(right)


@pytest.mark.parametrize("name", PICTURES)
def test_every_parameter_of_a_full_size_model_is_optimized(name: str) -> None:
    config = arm(name, model__size="11m", model__layers=0, model__width=0, model__heads=0).config
    model = build_subject(name, config, CPU).build(config, seed=0)
    groups = [group for optimizer in build_optimizers(model, config.train) for group in optimizer.param_groups]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for group in groups for parameter in group["params"]) == count
    assert 10e6 < count < 12e6


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_to_come_of_a_caption_and_other_samples_do_not_change_a_loss(name: str) -> None:
    config = arm(name).config
    subject = build_subject(name, config, CPU)
    model = subject.build(config, seed=0)
    x, y = subject.samples(0)(0, 4)
    losses, counted = model.losses(x, y)
    alone, _ = model.losses(x[:1], y[:1])
    assert torch.allclose(alone, losses[:1], atol=1e-5)
    assert torch.allclose(model(x, y), losses.sum() / counted.sum())
    if name == "captions":
        other = y.clone()
        other[:, 20:] = ord("z")
        changed, _ = model.losses(x, other)
        assert torch.allclose(changed[:, :20], losses[:, :20], atol=1e-5)
        assert torch.equal(counted, (y != PAD).float())


@pytest.mark.parametrize("name", DRAWN)
def test_a_few_steps_on_the_same_samples_lower_their_loss(name: str) -> None:
    it = arm(name, algorithm="dp")
    stepper = stepper_for(it)
    samples = stepper.subject.samples(0)(0, it.batch)
    stepper.set_lr(1e-2)
    stepper.step(*samples)
    before = stepper.loss
    for _ in range(40):
        stepper.step(*samples)
    assert stepper.loss < before / 2


@pytest.mark.parametrize("algorithm", ["dp", "decoupled", "streaming"])
def test_a_curve_ends_at_the_final_loss_and_does_not_change_it(algorithm: str) -> None:
    plain, watched = arm("glyphs", algorithm=algorithm), arm("glyphs", algorithm=algorithm, curve=4)
    stepper = stepper_for(plain)
    line, line_with_curve = quality.train(plain, stepper), quality.train(watched, stepper)
    assert line_with_curve["loss"] == line["loss"]
    points = line_with_curve["curve"]
    assert points[-1] == (line["tokens"], line["loss"])
    budget = plain.config.train.tokens
    assert [tokens * 4 // budget for tokens, _ in points] == [1, 2, 3, 4]
    assert len({loss for _, loss in points}) == 4


def test_diloco_equals_a_plain_loop() -> None:
    """Two islands that take 3 steps each, then one outer Nesterov step with the mean of their progress, four times."""
    it = arm(
        "glyphs",
        algorithm="diloco",
        train__final_lr=1.0,
        sync__merge="mean",
        sync__send="fp32",
        sync__outer_lr=0.7,
        sync__outer_momentum=0.6,
    )
    stepper = stepper_for(it)
    run = SequentialRun(it.config, stepper, stepper.subject.samples(0), Conditions())
    run.run()
    run.load_global()
    found = torch.cat([tensor.flatten() for tensor in stepper.tensors])

    stepper.reset(it.config)
    stepper.set_lr(it.config.train.lr)
    draw = stepper.subject.samples(0)
    outer = FragmentState.fresh(torch.cat([tensor.flatten() for tensor in stepper.tensors]))
    inner = [[tensor.clone() for tensor in stepper.state_tensors] for _ in range(2)]
    sizes = [tensor.numel() for tensor in stepper.tensors]
    for turn in range(4):
        progress = torch.zeros_like(outer.values)
        for island in range(2):
            for tensor, part in zip(stepper.tensors, outer.values.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))
            torch._foreach_copy_(stepper.state_tensors, inner[island])
            for step in range(3 * turn, 3 * turn + 3):
                stepper.step(*draw((step * 2 + island) * 4, 4))
            torch._foreach_copy_(inner[island], stepper.state_tensors)
            progress += (outer.values - torch.cat([tensor.flatten() for tensor in stepper.tensors])) / 2
        outer = nesterov(outer, progress, 0.7, 0.6)
    assert torch.allclose(found, outer.values, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["diloco", "streaming"])
def test_in_lock_step_nobody_goes_on_without_the_slow_one(algorithm: str) -> None:
    it = arm("glyphs", steps=24, algorithm=algorithm)
    stepper = stepper_for(it)
    run = SequentialRun(it.config, stepper, stepper.subject.samples(0), Conditions(step_times=(1.0, 3.5)))
    apart = []
    run.run(lambda run: apart.append(abs(run.learners[0].exchange.step - run.learners[1].exchange.step)))
    # With three fragments one is due at every step, and it may be one step late; diloco has one, due at every third.
    assert max(apart) == (3 if algorithm == "diloco" else 2)
    assert run.now >= 24 * 3.5 - 3.5


@pytest.mark.parametrize("algorithm", ["diloco", "streaming", "decoupled"])
@pytest.mark.parametrize("outage_steps", [4.0, 25.0])
def test_runs_end_although_islands_are_lost(algorithm: str, outage_steps: float) -> None:
    """In lock-step an island that is away for a moment is waited for, and one that is away for long is not."""
    it = arm("glyphs", steps=24, algorithm=algorithm, conditions={"lost_share": 0.5, "outage_steps": outage_steps})
    line = quality.train(it, stepper_for(it))
    assert line["lost_steps"] > 0
    assert line["tokens"] >= it.config.train.tokens


@pytest.mark.parametrize("restore", ["own", "peer", "none"])
def test_an_island_that_is_back_has_the_optimizer_state_it_should(restore: str) -> None:
    it = arm("glyphs", steps=24, conditions={"lost_share": 0.3, "outage_steps": 4.0, "restore": restore})
    stepper = stepper_for(it)
    run = SequentialRun(it.config, stepper, stepper.subject.samples(0), it.conditions)
    come_back, returns = run._return, []

    def watched(learner) -> None:
        before = [tensor.clone() for tensor in learner.optimizer_state]
        come_back(learner)
        if learner.alive:
            peer = run.learners[1 - learner.slot]
            peer_state = peer.optimizer_state if peer.alive else [torch.zeros_like(tensor) for tensor in before]
            wanted = {"own": before, "peer": peer_state, "none": [torch.zeros_like(tensor) for tensor in before]}[restore]
            returns.append(all(torch.equal(*pair) for pair in zip(learner.optimizer_state, wanted, strict=True)))

    run._return = watched
    run.run()
    assert returns and all(returns)


def test_an_island_without_its_optimizer_state_warms_up_as_a_real_one_does(monkeypatch) -> None:
    it = arm("glyphs", steps=24, conditions={"lost_share": 0.3, "outage_steps": 4.0, "restore": "none"}, train__final_lr=1.0)
    stepper = stepper_for(it)
    run = SequentialRun(it.config, stepper, stepper.subject.samples(0), it.conditions)
    rates: list[tuple[int | None, float]] = []
    set_lr, step, current = stepper.set_lr, run._step, []
    monkeypatch.setattr(run, "_step", lambda learner: (current.append(learner), step(learner)))
    monkeypatch.setattr(stepper, "set_lr", lambda lr: (rates.append((current[-1].cold_steps, lr)), set_lr(lr)))
    run.run()
    cold = [(since, lr) for since, lr in rates if since is not None]
    assert cold and len(cold) < len(rates)
    peak = it.config.train.lr
    assert cold == [(since, pytest.approx(peak * min(1.0, since / COLD_STEPS))) for since, _ in cold]
    assert all(lr == pytest.approx(peak) for since, lr in rates if since is None)


def test_an_outer_step_may_shrink_along_the_run(monkeypatch) -> None:
    it = arm("glyphs", steps=24, begin_share=0.0, sync__outer_lr=0.5, conditions__final_outer_lr=0.2)
    assert it.conditions == Conditions(final_outer_lr=0.2)
    rates: list[float] = []
    monkeypatch.setattr(
        sequential, "merge", lambda *given, lr, **more: rates.append(lr) or merge_fragment(*given, lr=lr, **more)
    )
    quality.train(it, stepper_for(it))
    assert rates == sorted(rates, reverse=True)
    assert 0.45 < rates[0] < 0.5 and rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("rule", ["carry", "eager", "eager at first, then carry"])
def test_one_island_that_keeps_all_it_learns_trains_as_if_it_were_alone(rule: str) -> None:
    """However long an exchange takes: a full outer step of its own progress is where it was, and all that it has foreseen."""
    conditions: dict[str, Any] = {"exchange_steps": 2.8, "begin_adopt": "eager" if rule.startswith("eager at") else ""}
    if rule == "eager":
        conditions["adopt"] = rule
    full = {"sync__outer_lr": 1.0, "sync__outer_momentum": 0.0, "sync__send": "fp32"}
    full["sync__adopt"] = "overwrite" if rule == "eager" else "carry"
    it = arm("teacher", steps=40, conditions=conditions, islands__count=1, sync__every=6, begin_share=0.5, **full)
    stepper = stepper_for(it)
    run_data_parallel(it.config, stepper, stepper.subject.samples(0))
    alone = [tensor.clone() for tensor in stepper.tensors]
    run = SequentialRun(it.config, stepper, stepper.subject.samples(0), it.conditions)
    given: list[int] = []
    merge = run._merge
    run._merge = lambda order: (given.append(sum(s.steps for s in order.shares) * (order.fragment == 0)), merge(order))
    run.run()
    run.load_global()
    assert run.core.run.merges > 20 and sum(given) == run.learners[0].exchange.step, "every step counts once"
    for found, wanted in zip(stepper.tensors, alone, strict=True):
        assert torch.allclose(found, wanted, atol=1e-4)


def test_the_rule_of_the_beginning_ends_with_it(monkeypatch) -> None:
    it = arm("teacher", steps=40, conditions={"begin_adopt": "carry"}, sync__every=6, begin_share=0.5)
    stepper = stepper_for(it)
    run = SequentialRun(it.config, stepper, stepper.subject.samples(0), it.conditions)
    rules: list[tuple[bool, str]] = []
    write = run._write

    def watched(tensors, index, change, rule="overwrite") -> None:
        if any(tensors is learner.weights for learner in run.learners) and run.core.step:
            rules.append((run.core.step < run.sync.begin.steps, rule))
        write(tensors, index, change, rule)

    monkeypatch.setattr(run, "_write", watched)
    run.run()
    assert set(rules) == {(True, "carry"), (False, "overwrite")}


def test_islands_that_wait_for_a_run_to_begin_come_in_with_what_it_has_then(monkeypatch) -> None:
    it = arm("teacher", steps=120, sync__every=6, begin_share=0.5, sync__begin__islands=1)
    stepper = stepper_for(it)
    run = SequentialRun(it.config, stepper, stepper.subject.samples(0), it.conditions)
    late, first_step = run.learners[1], []
    step = run._step

    def watched(learner) -> None:
        if learner is late and not first_step:
            held = [one.version for one in late.exchange.held]
            first_step.append((run.core.step, held, [fragment.version for fragment in run.core.fragments]))
        step(learner)

    monkeypatch.setattr(run, "_step", watched)
    run.run()
    ((at, held, newest),) = first_step
    assert at >= run.sync.begin.steps > run.sync.silence_s, "it waited for longer than one may be silent"
    assert min(held) > 0 and all(new - old <= 1 for old, new in zip(held, newest, strict=True))
    assert late.exchange.totals.steps > 0


def test_the_accuracy_is_the_share_of_characters_named_rightly() -> None:
    it = arm("glyphs")
    subject = build_subject("glyphs", it.config, CPU)
    model = subject.build(it.config, 0)
    _, y = subject._source.batch(HELD_OUT_SEED, 0, 300)
    common = int(y.bincount().argmax())
    with torch.no_grad():
        model.head.weight.zero_()  # all the same: the first class
    assert subject.accuracy(model, 300 * subject.sample.tokens) == pytest.approx((y == 0).float().mean().item())
    model.logits = lambda x: torch.nn.functional.one_hot(torch.full((len(x),), common), 94).float()
    assert subject.accuracy(model, 300 * subject.sample.tokens) == pytest.approx((y == common).float().mean().item())


def test_the_standard_error_is_that_of_a_mean_when_all_samples_count_the_same() -> None:
    losses = torch.tensor([3.0, 4.0, 8.0, 5.0])
    found = summary((2 * losses).tolist(), [2.0] * 4, 8)
    assert found.loss == pytest.approx(losses.mean().item())
    assert found.standard_error == pytest.approx((losses.std() / 2).item())


@pytest.mark.parametrize("path", sorted(QUALITY.glob("*.toml")), ids=lambda path: path.stem)
def test_every_matrix_is_valid(path: Path) -> None:
    matrix = tomllib.loads(path.read_text())
    found = quality.arms(matrix)
    assert len({arm.name for arm in found}) == len(found) > 0


def test_an_unknown_subject_is_named() -> None:
    with pytest.raises(ConfigError, match="subject must be one of text, glyphs, captions, teacher, got 'sounds'"):
        arm("sounds")
