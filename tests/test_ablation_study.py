# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/ablation_study.py: arms that differ in one thing, results that survive, honest tables."""

import json
import runpy
import subprocess
import sys

import cv2
import pytest
import torch
from config_helpers import ROOT
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from mmlinattn.analysis import ablation, ablation_report
from mmlinattn.analysis.inspecting import measure_block
from mmlinattn.analysis.study_tasks import TASKS
from mmlinattn.attention import TokenMixer
from mmlinattn.backbones import LinearPVT
from mmlinattn.utils.errors import RunError

TOOL = ROOT / 'tools' / 'analysis_tools' / 'ablation_study.py'
SMALL = ablation.Settings(iterations=4, batch=4, num_train=8, num_val=8)
QUICK = '--iterations', 2, '--batch', 4, '--num-train', 8, '--num-val', 8


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['ablation_study.py', *map(str, args)])
    runpy.run_path(str(TOOL), run_name='__main__')


@pytest.mark.parametrize('name', ablation.STUDIES)
def test_every_arm_builds_and_pairs_name_arms(name):
    study = ablation.STUDIES[name]()
    for arm in study.arms.values():
        model = MODELS.build(dict(arm.backbone)).eval()
        assert model(torch.zeros(1, 3, 64, 64))[-1].isfinite().all()
    for better, worse, metric in study.pairs:
        assert better in study.arms and worse in study.arms
        assert not isinstance(metric, str) or {metric} <= set(study.arms[better].paper) & set(study.arms[worse].paper)


def test_arms_have_the_same_size_but_for_what_they_lack():
    """The wider feed-forward network of the arms without a gate makes up for it (RALA Tab. 9)."""
    arms = ablation.STUDIES['rala']().arms
    sizes = {name: sum(p.numel() for p in MODELS.build(dict(arm.backbone)).parameters()) for name, arm in arms.items()}
    assert all(abs(size / sizes['full'] - 1) < 0.02 for size in sizes.values()), sizes


def test_pictures_are_named_by_their_largest_shape():
    task, settings = TASKS['largest'], ablation.Settings()
    images, labels = task.draw(12, settings, 3)
    assert images.shape == (12, 3, 64, 64) and images.dtype == torch.uint8
    assert set(labels.tolist()) <= set(range(6)) and len(set(labels.tolist())) > 1
    again = task.draw(12, settings, 3)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
    assert not torch.equal(images, task.draw(12, settings, 4)[0])


def test_recall_asks_for_the_spot_of_the_disc_in_the_same_colour():
    """Seen again in the pictures: at each place a disc without a spot, and one more of its colour around the answer."""
    task = TASKS['recall']
    images, targets = task.draw(8, task.settings, 0)
    palette = torch.tensor(task.palette).float()
    assert targets.shape == (8, 4, 3)
    others = 0
    for picture, points in zip(*task.mirrored(images, targets, torch.tensor([True, False] * 4))):
        pixels = picture.permute(1, 2, 0).float()
        rows, columns = torch.meshgrid(torch.arange(64) + 0.5, torch.arange(64) + 0.5, indexing='ij')
        distance, colour = torch.cdist(pixels.flatten(0, 1), palette).view(64, 64, 6).min(dim=-1)
        answers, discs = [], []
        for x, y, label in points.tolist():
            away = ((rows - y) ** 2 + (columns - x) ** 2).sqrt()
            own = colour[away < 5].mode().values
            assert (colour[away < 5] == own).float().mean() > 0.95 and distance[away < 5].mean() < 40  # no spot
            ring = (colour == own) & (distance < 40) & (away > 9)
            around = [colour[int(v) - 1 : int(v) + 2, int(u) - 1 : int(u) + 2] for u, v in _middles(ring)]
            assert int(label) in [patch.flatten().mode().values.item() for patch in around]
            answers.append(int(label))
            discs.append(int(own))
        assert len(set(answers)) == len(set(discs)) == 4
        others += set(answers) != set(discs)
    assert others >= 4  # of 8: the spots' colours are drawn for themselves, and one in 15 draws gives the discs' own


def _middles(mask):
    """Of the pieces of a mask that are as large as a disc, or its ring."""
    _, _, boxes, _ = cv2.connectedComponentsWithStats(mask.numpy().astype('uint8'), connectivity=8)
    return [(x + w / 2, y + h / 2) for x, y, w, h, _ in boxes[1:] if min(w, h) >= 10]


@pytest.mark.slow
def test_recall_is_learned_by_heart():
    torch.set_num_threads(1)
    task = TASKS['recall']
    data = task.draw(4, task.settings, 1)
    settings = task.settings._replace(iterations=60, batch=4, num_train=4, num_val=4)
    found = ablation.train_arm(ablation.STUDIES['inline']().arms['softmax'], 0, settings, data, data, task='recall')
    assert found['accuracy'] > 60


def test_boxes_enclose_what_is_drawn_and_turn_with_the_picture():
    task = TASKS['detection']
    images, targets = task.draw(12, task.settings, 0)
    assert images.shape == (12, 3, 96, 96) and targets.shape == (12, 5, 5)
    real = targets[targets[..., 4] >= 0]
    assert (real[:, :2] >= 0).all() and (real[:, 2:4] <= 96).all() and (real[:, 2:4] - real[:, :2] >= 6).all()
    turned, boxes = task.mirrored(images, targets, torch.tensor([True, False] * 6))
    assert torch.equal(turned[0], images[0].flip(-1)) and torch.equal(turned[1], images[1])
    assert torch.equal(boxes[1::2], targets[1::2])
    assert set(targets[::2, :, 4].flatten().tolist()) == set(range(-1, 6))  # whatever their form
    for (x0, y0, x1, y1, label), box in zip(targets[::2].flatten(0, 1).tolist(), boxes[::2].flatten(0, 1).tolist()):
        assert box == ([96 - x1, y0, 96 - x0, y1, label] if label >= 0 else [-1] * 5)


class Perfect(torch.nn.Module):
    """A detector that finds what it was told, shifted."""

    def __init__(self, targets, shift=0.0):
        super().__init__()
        self.weight, self.targets, self.shift = torch.nn.Parameter(torch.zeros(1)), targets, shift
        self.detector = self

    def predict(self, images, samples, rescale):
        for sample in samples:
            truth = sample.gt_instances
            scores = torch.ones(len(truth.bboxes))
            sample.pred_instances = type(truth)(bboxes=truth.bboxes + self.shift, labels=truth.labels, scores=scores)
        return samples


def test_box_ap_is_cocos():
    """All of it for the boxes themselves, none for boxes elsewhere, part of the IoUs for shifted ones."""
    pytest.importorskip('mmdet')
    task = TASKS['detection']
    images, targets = task.draw(6, task.settings, 0)
    assert task.score(Perfect(targets), images, targets) == pytest.approx(100)
    assert task.score(Perfect(targets, 90.0), images, targets) == 0
    assert 10 < task.score(Perfect(targets, 3.0), images, targets) < 90


def test_results_that_name_no_task_are_of_the_first(tmp_path):
    """As those of the first version."""
    path, settings = tmp_path / 'results.json', ablation.Settings()
    path.write_text(json.dumps(dict(study='rala', version='0.1', settings=settings._asdict(), runs=[])))
    assert ablation.load_results(path, 'rala', settings, 'largest')['task'] == 'largest'
    with pytest.raises(RunError, match="task 'largest' with .*, not of 'rala', .* task 'recall'"):
        ablation.load_results(path, 'rala', settings, 'recall')


@pytest.mark.slow
def test_detection_is_a_task_of_every_study(tmp_path, monkeypatch, capsys):
    """Trained, measured and written; a host of two stages, too. Results of one task are not mixed with another's."""
    pytest.importorskip('mmdet')
    quick = '--iterations', 2, '--batch', 2, '--num-train', 4, '--num-val', 4, '--seeds', 1
    for study, arm in (('rala', 'without CPE'), ('hallucinated', 'cFFN, r = 2')):
        out = tmp_path / study
        run(monkeypatch, '--study', study, '--task', 'detection', '--arms', arm, '--out', out, *quick)
        results = json.loads((out / 'results.json').read_text())
        assert results['task'] == 'detection' and results['settings']['size'] == 96
        (found,) = results['runs']
        assert found['box_AP'] >= 0 and len(found['attention']) == 5 and found['loss'] > 0
    text = (tmp_path / 'rala' / 'table.md').read_text()
    assert '| box AP |' in text and '| 47.0 COCO box AP |' in text and 'chance' not in text
    with pytest.raises(SystemExit):
        run(monkeypatch, '--study', 'rala', '--out', tmp_path / 'rala', '--size', 96, *quick)
    assert "task 'detection'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_detector_learns_by_heart():
    pytest.importorskip('mmdet')
    torch.set_num_threads(1)
    task = TASKS['detection']
    settings = task.settings._replace(iterations=60, batch=4, num_train=4, num_val=4, lr=2e-3)
    data = task.draw(4, settings, 1)
    arm = ablation.STUDIES['rala']().arms['full']
    found = ablation.train_arm(arm, 0, settings, data, data, task='detection')
    assert found['box_AP'] > 25, found


def test_sizes_are_those_of_merged_branches():
    """hMHSA Tab. 5: more branches while training, the same model after; the smaller ratio has as many parameters."""
    arms = ablation.STUDIES['hallucinated']().arms
    sizes = {
        name: ablation._parameters(MODELS.build(dict(arm.backbone)))
        for name, arm in arms.items()
        if 'FFN' in name or name == 'IHH, CHH'
    }
    assert sizes['cFFN, r = 1'] == sizes['cFFN, r = 2'] == sizes['cFFN, r = 3'] < sizes['IHH, CHH']
    assert abs(sizes['smaller FFN ratio'] / sizes['cFFN, r = 2'] - 1) < 0.01, sizes
    assert abs(sizes['cFFN of M1, r = 2'] / sizes['cFFN, r = 2'] - 1) < 0.01, sizes


def test_rates_rise_and_fall_as_settings_say(monkeypatch):
    """Over 5 % of the steps, then by a cosine, to a hundredth."""
    rates, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, 'step', lambda self: rates.append({g['lr'] for g in self.param_groups}) or step(self)
    )
    monkeypatch.setattr(ablation.TASKS['largest'], 'score', lambda *_: 0.0)
    monkeypatch.setattr(ablation, 'attention_measures', lambda *_: [])
    settings = ablation.Settings(iterations=40, batch=2, num_train=4, num_val=2, lr=0.001)
    data = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4)
    backbone = dict(ablation.STUDIES['inline']().arms['softmax'].backbone, stage_attns=('rala',) * 2)
    ablation.train_arm(ablation.Arm(backbone), 0, settings, data, data, task='largest')
    rates = [rate for (rate,) in rates]
    assert len(rates) == 40 and rates[:3] == pytest.approx([1e-5, 5e-4, 1e-3])
    assert rates[21] == pytest.approx(5e-4)  # in the middle of what follows the warm-up
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] == pytest.approx(1e-5)


@pytest.mark.slow
def test_training_learns_and_repeats():
    torch.set_num_threads(1)
    settings = ablation.Settings(iterations=40, batch=8, num_train=8, num_val=8)
    data = TASKS['largest'].draw(8, settings._replace(tinted=1.0), 1)
    arm = ablation.STUDIES['inline']().arms['identity, injective']
    found = [ablation.train_arm(arm, 0, settings, data, data) for _ in range(2)]
    assert found[0]['loss'] < 1.2 and found[0]['accuracy'] > 60  # by heart; chance is 1.79 and 17
    assert found[0]['loss'] == found[1]['loss'] and found[0]['accuracy'] == found[1]['accuracy']
    assert len(found[0]['attention']) == 5 and [step for step, _ in found[0]['curve']] == [10, 20, 30, 40]
    assert set(found[0]['masked']) == {'3x3', '9 others', '5x5', '25 others', '7x7', '49 others'}


@pytest.mark.slow
def test_a_study_resumes_where_it_was(tmp_path, monkeypatch, capsys):
    """Stopped by an error in the third of four runs, the next call does the two that are missing, and only these."""
    arms = '--arms', 'full', 'without CPE'
    args = '--study', 'rala', '--out', tmp_path, '--seeds', 2, *QUICK, *arms
    trained, real = [], ablation.train_arm

    def breaks(arm, seed, *rest):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(seed)
        return real(arm, seed, *rest)

    monkeypatch.setattr(ablation, 'train_arm', breaks)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, *args)
    kept = json.loads((tmp_path / 'results.json').read_text())
    assert [(r['arm'], r['seed']) for r in kept['runs']] == [('full', 0), ('without CPE', 0)]
    trained.clear()
    monkeypatch.setattr(ablation, 'train_arm', lambda *a: trained.append(a[1]) or real(*a))
    run(monkeypatch, *args)
    results = json.loads((tmp_path / 'results.json').read_text())
    assert trained == [1, 1] and len(results['runs']) == 4 and results['runs'][:2] == kept['runs']
    assert {'results.json', 'table.md', 'plot.png', 'ranks.png', '.locks'} == {path.name for path in tmp_path.iterdir()}
    text = (tmp_path / 'table.md').read_text()
    assert '| full | 2 |' in text and 'without KV augmentation' not in text  # what was not run is left out
    trained.clear()
    run(monkeypatch, *args)
    assert trained == []


def runs_take(monkeypatch, seconds):
    """Each run so much of a clock that nothing else moves; the clock, of one number."""
    now = [0.0]
    monkeypatch.setattr(ablation.time, 'monotonic', lambda: now[0])

    def slow(arm, seed, *rest):
        now[0] += seconds
        return dict(accuracy=50.0, curve=[[1, 50.0]], loss=1.0, params=1, attention=[], seconds=seconds)

    monkeypatch.setattr(ablation, 'train_arm', slow)
    return now


def test_time_is_kept(tmp_path, monkeypatch, capsys):
    """By the slowest run so far, the next one would end too late."""
    now = runs_take(monkeypatch, 100.0)
    results = ablation.run_study('flatten', tmp_path, 3, SMALL, max_minutes=6)
    assert len(results['runs']) == 3 and now[0] <= 360
    results = ablation.run_study('flatten', tmp_path, 3, SMALL, max_minutes=0.1)
    assert len(results['runs']) == 4  # each call gets further


def test_a_run_may_end_when_the_time_does(tmp_path, monkeypatch):
    """Two of half a minute in one minute."""
    runs_take(monkeypatch, 30.0)
    assert len(ablation.run_study('flatten', tmp_path, 1, SMALL, max_minutes=1)['runs']) == 2


def stand_in(monkeypatch, trained=None, accuracy=50.0):
    """Instead of training."""

    def train(arm, seed, *rest):
        if trained is not None:
            trained.append((arm, seed))
        return dict(accuracy=accuracy, curve=[[1, 50.0]], loss=1.0, params=1, attention=[], seconds=0.0)

    monkeypatch.setattr(ablation, 'train_arm', train)


def test_processes_share_a_study(tmp_path, monkeypatch):
    """A run that another process is at is left to it; what it was at is free again when it dies."""
    claim = str(ablation._claim(tmp_path, 'CHH, IHH', 1))
    code = """if True:
        import sys, time, filelock
        with filelock.FileLock(sys.argv[1]):
            print("held", flush=True)
            time.sleep(99)
    """
    other = subprocess.Popen([sys.executable, '-c', code, claim], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == 'held\n'
        stand_in(monkeypatch)
        said = []
        results = ablation.run_study('hallucinated', tmp_path, 2, SMALL, progress=said.append)
        assert len(results['runs']) == 21 and '1 of 22 runs are left' in said[-1]
    finally:
        other.kill()
        other.wait()
    results = ablation.run_study('hallucinated', tmp_path, 2, SMALL)
    assert len(results['runs']) == 22 and (results['runs'][-1]['arm'], results['runs'][-1]['seed']) == ('CHH, IHH', 1)


def test_a_run_is_claimed_until_its_result_is_kept(tmp_path, monkeypatch):
    """Others may train what is not under way."""
    claims, added = [], ablation._add

    def others():
        for seed in (0, 1):
            with ablation._claimed(tmp_path, 'plain', seed) as theirs:
                claims.append(theirs)

    def train(arm, seed, *rest):
        others()
        return dict(accuracy=10.0, curve=[[1, 50.0]], loss=1.0, params=1, attention=[], seconds=0.0)

    monkeypatch.setattr(ablation, 'train_arm', train)
    monkeypatch.setattr(ablation, '_add', lambda *args: (added(*args), others()))
    ablation.run_study('hallucinated', tmp_path, 1, SMALL, arms=['plain'])
    others()
    assert claims == [False, True] * 2 + [True] * 2


def test_what_another_process_finished_meanwhile_is_kept(tmp_path, monkeypatch):
    arms, trained = ['plain', 'IHH', 'CHH'], []
    stand_in(monkeypatch, accuracy=10.0)

    def train(arm, seed, *rest):  # while the first run is trained, another process does the second
        trained.append(arm)
        if len(trained) == 1:
            other = dict(arm='IHH', seed=0, accuracy=90.0, attention=[], curve=[], params=1)
            ablation._add('hallucinated', tmp_path, SMALL, [other])
        return dict(accuracy=10.0, curve=[[1, 50.0]], loss=1.0, params=1, attention=[], seconds=0.0)

    monkeypatch.setattr(ablation, 'train_arm', train)
    results = ablation.run_study('hallucinated', tmp_path, 1, SMALL, arms=arms)
    assert len(trained) == 2
    assert {r['arm']: r['accuracy'] for r in results['runs']} == {'plain': 10.0, 'IHH': 90.0, 'CHH': 10.0}


def test_runs_of_other_studies_are_reused_where_the_model_is_the_same(tmp_path, monkeypatch, capsys):
    folders = {name: tmp_path / name for name in ('inline', 'flatten', 'attentions')}
    for name, folder in folders.items():
        folder.mkdir()
        stand_in(monkeypatch, accuracy=40.0 if name == 'attentions' else 30.0)
        ablation.run_study(name, folder, 1, SMALL)
    trained = []
    stand_in(monkeypatch, trained)
    out = tmp_path / 'hallucinated'
    out.mkdir()
    added = ablation.reuse('hallucinated', out, SMALL, [folders['inline'], folders['attentions']])
    assert [(run['arm'], run['seed'], run['accuracy']) for run in added] == [('plain', 0, 30.0), ('IHH, CHH', 0, 40.0)]
    assert ablation.reuse('hallucinated', out, SMALL, [folders['attentions']]) == []  # first come, first kept
    results = ablation.run_study('hallucinated', out, 1, SMALL)
    assert len(trained) == 9 and len(results['runs']) == 11
    others = json.loads((folders['attentions'] / 'results.json').read_text())
    assert [run['arm'] for run in ablation.reusable_runs('flatten', others)] == ['focused, depth-wise']
    # an arm that wants the accuracy with masked weights takes no run without it
    assert ablation.reusable_runs('inline', others) == []


def test_arms_that_take_an_attention_as_it_comes_are_what_they_are_called():
    def mixers(study, arm):
        model = MODELS.build(dict(ablation.STUDIES[study]().arms[arm].backbone))
        return [m for m in model.modules() if isinstance(m, TokenMixer)]

    for mixer in mixers('flatten', 'focused, depth-wise'):
        assert mixer.focus and mixer.power == 3 and mixer.local.kernel_size == (5, 5)
    for mixer in mixers('inline', 'identity, injective, local residual'):
        assert mixer.kernel == 'identity' and mixer.injective and mixer.residual is not None
    for mixer in mixers('hallucinated', 'IHH, CHH'):
        assert mixer.steps == ('ihh', 'chh')


@pytest.mark.parametrize(
    'args, message',
    [
        (['--reuse', 'nowhere'], "--reuse 'nowhere' has no results.json"),
        (['--arms', 'fulll'], "--arms ['fulll']: study 'rala' has"),
        (['--seeds', '0'], '--seeds 0 has to be at least 1'),
        (['--max-minutes', '0'], '--max-minutes 0.0 has to be above 0'),
        (['--size', '32'], '--size 32 has to be at least 64'),
        (['--num-train', '4', '--batch', '8'], '--num-train 4 has to be at least 8'),
        (['--device', 'abacus'], '--device abacus'),
        (['--task', 'recall', '--tinted', '0.2'], "--tinted 0.2 has no meaning in task 'recall'"),
        (['--task', 'recall', '--tinted', '0', '--arms', 'fulll'], "--tinted 0.0 has no meaning in task 'recall'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, '--study', 'rala', '--out', tmp_path / 'out', *args)
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and error[-1].startswith('error:') and message in error[-1]


@pytest.mark.parametrize('text', ['{', '[]', '{"study": "rala"}', json.dumps(dict(study='rala', settings={}, runs=[]))])
def test_results_of_something_else_are_not_overwritten(tmp_path, text):
    (tmp_path / 'results.json').write_text(text)
    with pytest.raises(RunError, match='results.json is (no results file|of study)'):
        ablation.run_study('rala', tmp_path, 1, SMALL)
    assert (tmp_path / 'results.json').read_text() == text


def test_the_runs_of_the_page_can_be_reused(tmp_path):
    """With all folders named at once: those of other tasks are passed over."""
    folders = sorted((ROOT / 'benchmarks' / 'studies').iterdir())
    for folder in folders:
        out = tmp_path / folder.name
        out.mkdir()
        kept = json.loads((folder / 'results.json').read_text())
        task = kept.get('task', ablation.FIRST_TASK)
        assert folder.name == kept['study'] + ('' if task == ablation.FIRST_TASK else f'_{task}')
        added = ablation.reuse(kept['study'], out, TASKS[task].settings, folders, task)
        assert {(r['arm'], r['seed']) for r in kept['runs']} <= {(r['arm'], r['seed']) for r in added}
        assert all(TASKS[task].metric in run for run in added)
        assert f'| {added[0]["arm"]} |' in ablation_report.table(json.loads((out / 'results.json').read_text()))


def test_the_models_are_those_of_the_page(monkeypatch):
    """Those of the runs that are kept: parameters of every arm; blocks, heads, maps and sampled queries of one."""
    # what takes most of the time, and changes no size
    monkeypatch.setattr(BaseModule, 'init_weights', lambda self: None)
    monkeypatch.setattr(ablation, 'measure_block', lambda block, what, number: measure_block(block, (), number))
    for folder in sorted((ROOT / 'benchmarks' / 'studies').iterdir()):
        kept = json.loads((folder / 'results.json').read_text())
        name = kept.get('task', ablation.FIRST_TASK)
        if name == 'detection':
            pytest.importorskip('mmdet')
        task, arms = TASKS[name], ablation.STUDIES[kept['study']]().arms
        for run in {run['arm']: run for run in kept['runs']}.values():
            with torch.device('meta'):
                size = ablation._parameters(task.build(arms[run['arm']].backbone))
            assert size == run['params'], f'{folder.name}: {run["arm"]}'
        if folder.name not in ('rala', 'rala_detection', 'inline'):
            continue
        model = task.build(arms[run['arm']].backbone).eval()
        images = torch.randint(256, (1, 3, kept['settings']['size'], kept['settings']['size']), dtype=torch.uint8)
        parts = ('block', 'mixer', 'heads', 'map', 'key_map', 'sampled_queries')
        seen = [[block[part] for part in parts] for block in ablation.attention_measures(model, images)]
        assert seen == [[block[part] for part in parts] for block in run['attention']], folder.name


def test_counting_leaves_the_branches_of_a_model_as_they_are():
    model = MODELS.build(dict(ablation.STUDIES['hallucinated']().arms['cFFN, r = 2'].backbone)).eval()
    before = model.state_dict()
    assert ablation._parameters(model) < sum(p.numel() for p in model.parameters())
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize(('study', 'arm'), [('rala', 'full'), ('inline', 'softmax')])
def test_arms_drop_no_paths(study, arm):
    """In training, the same answer twice."""
    model = MODELS.build(dict(ablation.STUDIES[study]().arms[arm].backbone))
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        one, other = (model.train()(images)[0] for _ in range(2))
    assert torch.equal(one, other) and model.training


def test_models_start_as_their_backbones_do(monkeypatch):
    """Not with PyTorch's own initial weights."""
    started = []
    monkeypatch.setattr(LinearPVT, 'init_weights', lambda self: started.append(self))
    backbone = ablation.STUDIES['inline']().arms['softmax'].backbone
    models = [TASKS[name].build(backbone) for name in ('largest', 'recall')]
    assert [id(one) for one in started] == [id(model.backbone) for model in models]
    pytest.importorskip('mmdet')
    assert TASKS['detection'].build(backbone).detector.backbone is started[2]


def result(arm, seed, accuracy):
    block = dict(rank=dict(state=dict(effective=3.0, at_most=32)), confusion=dict(share=0.25))
    return dict(arm=arm, seed=seed, accuracy=accuracy, params=1000, curve=[[1, accuracy]], attention=[block, {}])


def test_verdicts_and_table():
    assert ablation_report.verdict([3, 4], [1, 2]) == 'holds'
    assert ablation_report.verdict([1, 2], [3, 4]) == 'reversed'
    assert ablation_report.verdict([1, 3], [2, 4]) == 'within the spread'
    assert ablation_report.verdict([1, 9], [2, 3]) == ablation_report.verdict([2, 3], [1, 9]) == 'within the spread'
    assert ablation_report.verdict([3, 4], [2, 3]) == 'within the spread'
    assert ablation_report.verdict([3], [1]) == 'one seed'
    runs = [result('full', 0, 60.0), result('full', 1, 62.0), result('without CPE', 0, 50.0)]
    assert ablation_report.differences(runs, [result('full', 1, 60.5), result('full', 2, 1.0)]) == [1.5]
    text = ablation_report.table(dict(study='rala', settings=SMALL._asdict(), runs=runs))
    assert '| full | 2 | 1 k | 61.0 ± 1.4 | 82.8 ImageNet, 47.3 COCO box AP, 47.9 ADE20K mIoU | 3.0 of 32 |' in text
    assert '25.00%' in text and 'as projected' not in text  # columns that nothing is known of are left out
    assert '| full | without CPE | +0.1 (ImageNet) | +10.0 | +10.0 | one seed |' in text
    # of one arm the paper says nothing, of another nobody measured ranks
    runs = [result('relu, linear', 0, 60.0), {**result('softmax', 0, 62.0), 'attention': [{}]}]
    lines = ablation_report.table(dict(study='inline', settings=SMALL._asdict(), runs=runs)).splitlines()
    assert '| arm | seeds | parameters | accuracy | paper | effective rank of the state | confused pairs |' in lines
    assert '| relu, linear | 1 | 1 k | 60.0 |  | 3.0 of 32 | 25.00% |' in lines
    assert '| softmax | 1 | 1 k | 62.0 | 72.2 ImageNet |  |  |' in lines
