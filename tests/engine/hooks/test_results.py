# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.engine_toys import LOADER, Count, make_runner, validation, warnings_of
from matplotlib.figure import Figure
from mmengine.structures import BaseDataElement, InstanceData, LabelData, PixelData

from mmlinattn.engine import plots
from mmlinattn.engine.hooks import results

HOOKS = [dict(type='ResultsHook')]


def rows(folder):
    return results.read_rows(folder / 'results.csv')


def test_a_row_an_epoch_with_mean_losses_and_metrics(tmp_path):
    Count.calls = 0
    runner = make_runner(tmp_path, HOOKS, **validation())
    runner.train()
    first, last = rows(tmp_path)
    assert (first['epoch'], first['iteration'], first['acc']) == (1, 3, 1)
    assert (last['epoch'], last['iteration'], last['acc']) == (2, 6, 2)
    losses = runner.message_hub.get_scalar('train/loss').data[0]
    assert [row['loss'] for row in (first, last)] == pytest.approx([losses[:3].mean(), losses[3:].mean()], rel=1e-5)
    assert first['lr'] == last['lr'] == 0.01
    assert (tmp_path / 'results.png').stat().st_size > 10_000


def test_rates_of_several_optimizers(tmp_path, monkeypatch):
    monkeypatch.setattr('mmengine.optim.OptimWrapper.get_lr', lambda self: {'g.lr': [0.1], 'd.lr': [0.2]})
    plotted = mock.Mock()
    monkeypatch.setattr(plots, 'plot_training', plotted)
    make_runner(tmp_path, HOOKS).train()
    assert [(row['g.lr'], row['d.lr']) for row in rows(tmp_path)] == [(0.1, 0.2)] * 2
    _, losses, rates, metrics, _ = plotted.call_args.args
    assert [*map(sorted, (losses, rates, metrics))] == [['loss'], ['d.lr', 'g.lr'], []]


@pytest.mark.parametrize('validates', [True, False])
def test_iteration_based_runs(tmp_path, validates):
    loop = dict(by_epoch=False, max_iters=6, val_interval=3)
    make_runner(tmp_path, HOOKS, loop, **validation() if validates else {}).train()
    found = rows(tmp_path)
    assert [row['iteration'] for row in found] == [*range(1, 7)] and 'epoch' not in found[0]  # hundredths of six
    assert [row['iteration'] for row in found if row.get('acc')] == [3, 6] * validates


def test_a_resumed_run_continues_the_rows_of_its_checkpoint(tmp_path):
    make_runner(tmp_path, HOOKS, **validation()).train()
    before = rows(tmp_path)
    loop = dict(by_epoch=True, max_epochs=3)
    runner = make_runner(tmp_path, HOOKS, loop, **validation(), load_from=str(tmp_path / 'epoch_1.pth'), resume=True)
    runner.train()
    after = rows(tmp_path)
    assert [row['epoch'] for row in after] == [1, 2, 3] and after[0] == before[0]
    assert all(one['seconds'] <= other['seconds'] for one, other in zip(after, after[1:]))
    make_runner(tmp_path, HOOKS, **validation()).train()  # a new run
    assert [row['epoch'] for row in rows(tmp_path)] == [1, 2]


def test_an_epoch_of_another_length_has_one_row(tmp_path):
    """The batch size changed: the validation after a resumption is at another iteration of the same epoch."""
    hook, runner = (
        results.ResultsHook(),
        SimpleNamespace(message_hub=SimpleNamespace(log_scalars={}), work_dir=str(tmp_path)),
    )
    hook.unit = 'epoch'
    hook._add_row(runner, 3, epoch=1)
    hook._add_row(runner, 6, dict(accuracy=0.5), epoch=1)
    assert [(row['iteration'], row['accuracy']) for row in rows(tmp_path)] == [(3, 0.5)]


@pytest.mark.parametrize('loop', [dict(by_epoch=True, max_epochs=2), dict(by_epoch=False, max_iters=300)])
def test_mean_losses_of_a_run_resumed_between_two_rows(tmp_path, loop):
    hooks, saves = [*HOOKS, dict(type='ExactResumeHook')], dict(type='CheckpointHook', by_epoch=False, interval=4)

    def losses(**more):
        make_runner(tmp_path, hooks, loop, default_hooks=dict(checkpoint=saves), **more).train()
        return [row['loss'] for row in rows(tmp_path)]

    whole = losses(randomness=dict(seed=1))
    assert losses(load_from=str(tmp_path / 'iter_4.pth'), resume=True) == whole


def loader_of(instances=(), classes=('a', 'b'), size=3):
    class Data(list):
        metainfo = dict(classes=classes)

        def get_data_info(self, index):
            return dict(img_path=f'{index}.jpg', instances=instances)

    return SimpleNamespace(dataset=Data(range(size)))


def label_map(truth, predicted):
    maps = {key: PixelData(data=torch.tensor([row])) for key, row in (('gt', truth), ('pred', predicted))}
    return BaseDataElement(gt_sem_seg=maps['gt'], pred_sem_seg=maps['pred'])


def labels(truth, predicted):
    return BaseDataElement(gt_label=torch.tensor([truth]), pred_label=torch.tensor([predicted]))


@pytest.mark.parametrize(
    ('samples', 'expected'),
    [
        ([label_map([[0, 1], [1, 255]], [[0, 0], [1, 1]])], [[1, 0], [1, 1]]),
        ([label_map([[0, 0, 1, 1, 1]], [[0, 1, 1, 1, 1]])], [[1, 1], [0, 3]]),
        ([labels(0, 1), labels(1, 1), labels(1, 1)], [[0, 1], [0, 2]]),
        ([labels(0, 0)] * 4, [[3, 0], [0, 0]]),  # three images, and a repeated one
    ],
)
def test_confusion_of_labels(tmp_path, samples, expected):
    predictions = results._PredictionPlots(loader_of())
    predictions.add(samples)
    np.testing.assert_array_equal(predictions.matrix, expected)
    assert predictions.write(str(tmp_path), '') == [str(tmp_path / 'confusion_matrix.png')]


def test_a_validation_is_plotted(tmp_path):
    data = dict(LOADER, dataset=dict(type='ToyDataset', metainfo=dict(classes=('a', 'b'))))
    runner = make_runner(tmp_path, HOOKS, dict(by_epoch=True, max_epochs=1), **dict(validation(), val_dataloader=data))
    runner.model.val_step = lambda data: [labels(0, 1)] * 4
    runner.train()
    assert (tmp_path / 'confusion_matrix.png').exists()


def test_images_that_samplers_repeat_count_once(monkeypatch):
    """The second of two processes has images 1 and, as there is no 3, 0 once more."""
    monkeypatch.setattr(results, 'get_world_size', lambda: 2)
    monkeypatch.setattr(results, 'get_rank', lambda: 1)
    predictions = results._PredictionPlots(loader_of())
    predictions.add([labels(0, 0), labels(1, 1)])
    assert predictions.matrix.sum() == 1


@pytest.mark.parametrize('instances', [[dict(bbox=[0, 0, 10, 10], bbox_label=1)], []])
def test_plots_of_a_detector(tmp_path, instances):
    """Without annotations nothing is counted as false, and nothing plotted."""
    predictions = results._PredictionPlots(loader_of(instances))
    boxes = InstanceData(bboxes=torch.tensor([[0.0, 0, 9, 10]]), labels=torch.tensor([1]), scores=torch.tensor([0.5]))
    predictions.add([BaseDataElement(metainfo=dict(img_path=f'{i}.jpg'), pred_instances=boxes) for i in range(3)])
    names = ['test_confusion_matrix.png', 'test_precision_recall.png'] * len(instances)
    assert predictions.write(str(tmp_path), 'test_') == [str(tmp_path / name) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_other_predictions_have_no_plots(tmp_path):
    predictions = results._PredictionPlots(loader_of())
    predictions.add(
        [BaseDataElement(pred_depth_map=torch.zeros(1)), label_map([[0]], [[0, 1]]), LabelData(), torch.ones(2)]
    )
    assert predictions.write(str(tmp_path), '') == []


def test_curves_of_a_detector():
    """The best F1, 2/3, is that of the precision of 1 at half of the recall."""
    figures = []
    precision, scores = np.array([[1.0, -1], [1, -1], [0, -1]]), np.array([[0.9, 0], [0.5, 0], [0, 0]])
    with mock.patch.object(Figure, 'savefig', lambda self, path, dpi: figures.append(self)):
        plots.plot_precision_recall('a.png', precision, scores, ['a', 'b'])
        plots.plot_confusion('a.png', np.eye(2), ['a', 'b'], 'a title')
    left, right = figures[0].axes
    assert left.lines[0].get_xydata().tolist() == [[0, 1], [0.5, 1], [1, 0]]
    assert [line.get_label() for line in (*left.lines, right.lines[1])] == [
        'a  AP50 0.667',
        'mean  AP50 0.667',
        'mean  0.667 at score 0.00',
    ]
    axes = figures[1].axes[0]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ('a title', 'predicted', 'true')


def test_panels_of_a_training(tmp_path):
    """No panel without curves, ticks at whole epochs, a style for each of many metrics, and a smoothed loss."""
    figures = []
    with mock.patch.object(Figure, 'savefig', lambda self, path, dpi: figures.append(self)):
        noisy = np.arange(100), np.tile([1.0, 3.0], 50)
        plots.plot_training('a.png', dict(loss=noisy), dict(lr=noisy), {}, 'epoch')
        plots.plot_training('a.png', dict(loss=noisy), {}, {f'm{i}': ([1], [i / 16]) for i in range(16)}, 'epoch')
    assert [[axes.get_title() for axes in figure.axes] for figure in figures] == [
        ['loss', 'learning rate'],
        ['loss', 'metric'],
    ]
    raw, smoothed = (line.get_ydata() for line in figures[0].axes[0].lines)
    assert np.ptp(raw) == 2 and np.ptp(smoothed) < 1
    lines = figures[1].axes[1].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 16
    assert [tick for tick in figures[1].axes[1].get_xticks() if tick % 1] == []


def test_a_second_run_in_a_folder_keeps_the_results_of_the_first(tmp_path):
    for _ in range(2):
        said = warnings_of(make_runner(tmp_path, HOOKS, **validation()))
    (kept,) = tmp_path.glob('results_*.csv')
    assert kept.name in said[0] and len(kept.read_text().splitlines()) == 3 == len(rows(tmp_path)) + 1


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(results, 'atomic_write', fail)
    runner = make_runner(tmp_path, HOOKS)
    assert 'results.csv could not be written: No space left on device.' in warnings_of(runner)[0] and runner.iter == 6
