# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The config that is written for data of each kind; ``tests/docs/test_own_data.py`` trains with it."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.own_files import assert_refused, coco_dict, picture, text
from mmengine.config import Config

from mmlinattn.tooling.own_data import making, settings
from mmlinattn.utils.errors import RunError


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(making, '_try', lambda args: None)


def noise(shape, dtype=np.uint8, high=250):
    return np.random.default_rng(0).integers(0, high, shape).astype(dtype)


def boxes(root, outline=(), shape=(480, 640, 3), dtype=np.uint8):
    for i in range(10):
        picture(root / f'{i}.png', noise(shape, dtype))
    more = dict(segmentation=[list(outline)]) if outline else {}
    files, size = [f'{i}.png' for i in range(10)], shape[1::-1]
    text(root / 'all.json', coco_dict(files, ('cell', 'dust'), size, bbox=[2, 2, 20, 20], **more))
    return root


def made(root, task, backbone, **more):
    args = settings.ConfigArgs(root, task, backbone, root.parent / 'mine.py', **more)
    lines, _ = making.make_config(args)
    return Config.fromfile(str(args.out)), lines


def heads(cfg):
    return re.findall(r"'num_classes': (\d+)", str(cfg.model.to_dict()))


@pytest.mark.parametrize(
    'backbone, outline, kind, count',
    [
        ('ravlt_t', (), 'RetinaNet', 1),
        ('ravlt_t', (2, 2, 22, 2, 22, 22), 'MaskRCNN', 2),
        ('inline_pvt_t', (), 'FasterRCNN', 1),
        ('inline_swin_t', (2, 2, 22, 2, 22, 22), 'CascadeRCNN', 4),
    ],
)
def test_detectors(tmp_path, untried, backbone, outline, kind, count):
    cfg, _ = made(boxes(tmp_path / 'data', outline), 'detection', backbone, batch=4)
    assert cfg.model.type == kind and heads(cfg) == ['2'] * count
    assert 'SyncBN' not in str(cfg.model)
    assert cfg.train_pipeline[2].scale == (640, 480)  # as the images are, not COCO's
    assert cfg.train_dataloader.dataset.metainfo.classes == ('cell', 'dust')
    assert cfg.train_dataloader.dataset.filter_cfg == dict(filter_empty_gt=False, min_size=1)  # all that was counted
    rate = 2e-4 if 'pvt' in backbone else 1e-4  # of the recipe, for 16 images
    assert cfg.optim_wrapper.optimizer.lr == pytest.approx(rate * 4 / 16) and cfg.auto_scale_lr.base_batch_size == 4
    assert cfg.param_scheduler[0].end == 2 * cfg.max_epochs // 10  # of 2 iterations; the recipe warms up for 500
    assert cfg.val_evaluator.metric == (['bbox', 'segm'] if outline else 'bbox')
    whole = backbone == 'ravlt_t'
    assert (cfg.load_from is not None, cfg.model.backbone.get('init_cfg') is None) == (whole, whole)


def test_polygons_for_a_backbone_without_a_mask_head(tmp_path, untried):
    cfg, lines = made(boxes(tmp_path / 'data', (2, 2, 22, 2, 22, 22)), 'detection', 'flatten_pvt_v2_b1')
    assert cfg.val_evaluator.metric == 'bbox' and 'with_mask' not in cfg.train_pipeline[1]
    assert any('the only detector of flatten_pvt_v2_b1 is RetinaNet: boxes alone are learnt' in line for line in lines)


def test_a_picture_and_an_edited_config_are_kept(tmp_path, untried):
    data, out, mine = boxes(tmp_path / 'data'), tmp_path / 'mine.py', picture(tmp_path / 'labels.png')
    assert_refused('labels.png is not a drawing of this tool', made, data, 'detection', 'ravlt_t')
    mine.unlink()
    _, lines = made(data, 'detection', 'ravlt_t')
    assert any('downloads the weights from http' in line and '--scratch' in line for line in lines)
    assert max(map(len, out.read_text().splitlines()[:3])) <= 120
    _, lines = made(data, 'detection', 'ravlt_t', batch=4, scratch=True)  # as it was written: replaced
    assert 'lr=0.0002' in out.read_text() and not any('download' in line for line in lines)
    out.write_text(edited := out.read_text().replace('lr=0.0002', 'lr=0.0003'))
    assert_refused(("mine.py' was edited", 'Set --overwrite, or name another file'), made, data, 'detection', 'ravlt_t')
    assert out.read_text() == edited
    made(data, 'detection', 'ravlt_t', overwrite=True)
    assert 'lr=0.0003' not in out.read_text()


@pytest.mark.parametrize('shape, dtype', [((96, 128, 4), np.uint8), ((96, 128), np.uint16)])
def test_other_channels_start_from_none_and_are_tried(tmp_path, shape, dtype):
    cfg, lines = made(boxes(tmp_path / 'data', shape=shape, dtype=dtype), 'detection', 'flatten_pvt_v2_b1')
    assert cfg.model.backbone.in_channels == (shape[2] if len(shape) > 2 else 1)
    assert cfg.load_from is None and cfg.model.backbone.get('init_cfg') is None
    assert cfg.optim_wrapper.optimizer.lr == 2e-4 and 'it learns from scratch' in ' '.join(lines)
    assert cfg.model.data_preprocessor.mean == pytest.approx([125], abs=5)


def test_configs_open_without_an_import_before_and_move_with_their_data(tmp_path, untried):
    """As DetInferencer and upstream's tools read them; paths follow the folder of the config."""
    made(boxes(tmp_path / 'here' / 'data'), 'detection', 'ravlt_t')
    (tmp_path / 'here').rename(tmp_path / 'there')
    code = 'import sys; from mmengine.config import Config; cfg = Config.fromfile(sys.argv[1]); d = cfg.val_dataloader.'
    code += 'dataset; print(cfg.model.backbone.type, d.data_root, d.ann_file, cfg.val_evaluator.ann_file)'
    command = [sys.executable, '-W', 'ignore', '-c', code, str(tmp_path / 'there' / 'mine.py')]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()
    there = tmp_path / 'there'
    assert said == ['RAVLT', f'{there}/data/', f'{there}/mine_val.json', f'{there}/mine_val.json']


def test_dense_images_and_ignored_objects_widen_the_limits(tmp_path, untried):
    """Raise the limits of head, proposals and metric for more than 100 objects an image; ignored regions are no
    background."""
    root = boxes(tmp_path / 'data', outline=(2, 2, 22, 2, 22, 22))
    content = json.loads((root / 'all.json').read_text())
    entry = content['annotations'][0]
    more = [dict(entry, id=20 + i, iscrowd=int(i == 149)) for i in range(150)]
    text(root / 'all.json', dict(content, annotations=content['annotations'] + more))
    cfg, lines = made(root, 'detection', 'ravlt_t')
    assert 'up to 150 objects an image: max_per_img = 300, and as many are evaluated' in lines
    test = cfg.model.test_cfg
    assert test.rcnn.max_per_img == 300 and min(test.rpn.max_per_img, test.rpn.nms_pre) >= 1200
    assert cfg.model.train_cfg.rpn_proposal.max_per_img >= 1200
    assert cfg.val_evaluator.use_mp_eval and cfg.val_evaluator.proposal_nums == (100, 300, 1000)
    content['annotations'] += [dict(entry, id=20 + i) for i in range(1100)]
    text(root / 'all.json', content)
    denser, _ = made(root, 'detection', 'ravlt_t')
    assert denser.val_evaluator.proposal_nums == (100, 300, denser.model.test_cfg.rcnn.max_per_img)
    assert cfg.model.train_cfg.rpn.assigner.ignore_iof_thr == cfg.model.train_cfg.rcnn.assigner.ignore_iof_thr == 0.5


def test_segmentation_of_small_images(tmp_path, untried):
    for i in range(6):
        picture(tmp_path / 'data' / 'images' / f'{i}.png', noise((100, 130, 3)))
        picture(tmp_path / 'data' / 'masks' / f'{i}.png', noise((100, 130), high=2))
    cfg, _ = made(tmp_path / 'data', 'segmentation', 'inline_swin_t', classes=['soil', 'root'])
    assert heads(cfg) == ['2', '2'] and cfg.model.data_preprocessor.size == (96, 96)
    assert cfg.max_iters == 4000 and cfg.param_scheduler[-1].end == 4000
    assert cfg.model.backbone.init_cfg.checkpoint == 'mmlinattn://inline_swin_t'
    assert 'reduce_zero_label' not in str(cfg.train_dataloader)


def test_classification(tmp_path, untried):
    for name in 'ab':
        for i in range(5):
            picture(tmp_path / 'data' / name / f'{i}.png')
    cfg, _ = made(tmp_path / 'data', 'classification', 'ravlt_t')
    assert (cfg.model.head.num_classes, cfg.data_preprocessor.num_classes) == (2, 2)
    assert cfg.val_evaluator.topk == (1,) and cfg.train_pipeline[1].scale == 224
    small, _ = made(tmp_path / 'data', 'classification', 'ravlt_t', size=64, scratch=True)
    assert small.train_pipeline[1].scale == 64 and small.load_from is None


@pytest.mark.parametrize(
    'task, steps, length, warm, every',
    [
        ('detection', 0.5, 100, 10, 8),
        ('detection', 72.5, 28, 204, 2),
        ('classification', 5000, 30, 500, 2),
        ('segmentation', 100, 5000, 500, 500),
        ('segmentation', 5000, 160000, 1500, 16000),
    ],
)
def test_the_length_of_a_training_follows_the_data(task, steps, length, warm, every):
    schedule = settings.schedule(task, steps, Config(dict(train_cfg=dict(max_iters=160000))))
    assert schedule['max_iters' if task == 'segmentation' else 'max_epochs'] == length
    assert schedule['param_scheduler'][0]['end'] == warm
    assert schedule['train_cfg']['val_interval'] == schedule['default_hooks']['checkpoint']['interval'] == every


def test_refused_arguments(tmp_path, untried):
    root = boxes(tmp_path / 'data')
    with pytest.raises(RunError, match="'flatten_swin_b' has no config for detection; these have: .*ravlt_t"):
        made(root, 'detection', 'flatten_swin_b')
    with pytest.raises(RunError, match='is inside of DATA'):
        making.make_config(settings.ConfigArgs(root, 'detection', 'ravlt_t', root / 'mine.py'))
    assert_refused('would be written over DATA', made, text(tmp_path / 'mine_train.json', '{}'), 'detection', 'ravlt_t')


def test_data_that_does_not_load_is_one_line(tmp_path, monkeypatch):
    root, values = boxes(tmp_path / 'data'), making.config_values

    def lose(args, data, *more):  # after the images were inspected
        for path in data.images['train']:
            path.write_bytes(b'')
        return values(args, data, *more)

    monkeypatch.setattr(making, 'config_values', lose)
    assert_refused('mine.py: the data cannot be read:', made, root, 'detection', 'ravlt_t')
