# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/analysis_tools/inspect_attention.py on configs of the three tasks."""

import copy
import json
import runpy
import sys

import numpy as np
import pytest
import torch
from config_helpers import ROOT, build

mmcv = pytest.importorskip('mmcv')
TOOL = ROOT / 'tools' / 'analysis_tools' / 'inspect_attention.py'
CLASSIFIER = ROOT / 'configs' / 'mmpretrain' / 'ravlt_shapes_quickstart.py'


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / 'photo.png'
    mmcv.imwrite(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8), str(path))
    return path


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['inspect_attention.py', *map(str, args)])
    runpy.run_path(str(TOOL), run_name='__main__')


def written(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}


def test_everything_of_a_classifier_without_checkpoint(picture, tmp_path, monkeypatch, capsys):
    pytest.importorskip('mmpretrain')
    out = tmp_path / 'new' / 'out'
    run(monkeypatch, CLASSIFIER, 'none', picture, '--out', out, '--query', 70, 30, '--num-queries', 16)
    summary = json.loads((out / 'summary.json').read_text())
    assert summary['checkpoint'] == 'none'
    blocks = summary['blocks']
    assert [block['mixer'] for block in blocks] == ['rala', 'rala', 'softmax', 'softmax', 'softmax']
    assert [block['map'] for block in blocks] == [[16, 16], [8, 8], [4, 4], [4, 4], [2, 2]]  # resized to 64 x 64
    assert [block['heads'] for block in blocks] == [1, 2, 4, 4, 5]
    for block in blocks:
        assert block['forward_error'] < 1e-5
        assert {'rank', 'confusion', 'locality', 'sharpness', 'ccs'} <= set(block)
        assert ('state' in block['rank']) == (block['mixer'] == 'rala')
        assert len(block['confusion']['share']) == block['heads']
    assert blocks[0]['ccs'] is None and -1 <= blocks[1]['ccs'] <= 1
    # the picture is 140 wide and 90 high, the network sees 64 x 64
    assert summary['images'][0]['query'] == [70, 30] and summary['images'][0]['query_shown'] == [32, 21]
    names = {'rank', 'confusion', 'locality', 'sharpness', 'ccs'}
    maps = {f'maps/photo_{rest}.png' for rest in ('full', 'query_70_30', 'query_70_30_with_local')}
    assert written(out) == {'summary.json', *(f'{name}.png' for name in names), *maps}
    assert '5 blocks; weights @ v against the forward pass' in capsys.readouterr().out


def test_any_size_and_some_of_it(picture, tmp_path, monkeypatch):
    """An odd size in place of the pipeline's; two pictures are averaged."""
    pytest.importorskip('mmpretrain')
    args = '--shape', 75, 101, '--what', 'locality', '--num-queries', 8
    run(monkeypatch, CLASSIFIER, 'none', picture, picture, '--out', tmp_path / 'out', *args)
    assert written(tmp_path / 'out') == {'summary.json', 'locality.png'}
    blocks = json.loads((tmp_path / 'out' / 'summary.json').read_text())['blocks']
    assert blocks[0]['map'] == [19, 26] and 'rank' not in blocks[0]
    assert blocks[0]['locality']['chance'] == pytest.approx(9 / 19 / 26)
    assert blocks[0]['sampled_queries'] == 8


def test_random_weights_are_the_same_on_every_call(picture, tmp_path, monkeypatch):
    """At the smallest size, where the last map is a single token."""
    pytest.importorskip('mmpretrain')
    found = []
    for name in ('one', 'two'):
        args = '--shape', 32, 32, '--num-queries', 8, '--what', 'rank', 'confusion', 'locality', 'sharpness', 'ccs'
        run(monkeypatch, CLASSIFIER, 'none', picture, '--out', tmp_path / name, *args)
        found.append(json.loads((tmp_path / name / 'summary.json').read_text())['blocks'])
    assert found[0] == found[1]


TASKS = {
    'mmdet': ('mmdet/ravlt_shapes_quickstart', {}),
    'mmseg, windows': (
        'mmseg/inline_swin_t_upernet_160k',
        dict(
            model__backbone__arch=dict(
                _delete_=True,
                embed_dims=(16, 32, 32, 32),
                depths=(1, 1, 2, 1),
                num_heads=(1, 2, 2, 2),
                stage_attns=('inline', 'focused', 'softmax', 'softmax'),
            ),
            model__decode_head__in_channels=[16, 32, 32, 32],
            model__decode_head__channels=16,
            model__auxiliary_head__in_channels=32,
            test_dataloader__dataset__pipeline__1__scale=(160, 100),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('task', ['mmdet', 'mmseg, windows'])
def test_detectors_and_segmentors_with_a_checkpoint(picture, tmp_path, monkeypatch, task):
    pytest.importorskip(task.partition(',')[0])
    name, options = TASKS[task]
    model, cfg = build(name, **copy.deepcopy(options))  # merging takes _delete_ out
    cfg.dump(str(tmp_path / 'config.py'))
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.normal_(std=0.3)
    torch.save(dict(state_dict=model.state_dict(), meta={}), tmp_path / 'model.pth')
    out = tmp_path / 'out'
    run(monkeypatch, tmp_path / 'config.py', tmp_path / 'model.pth', picture, '--out', out, '--num-queries', 24)
    summary = json.loads((out / 'summary.json').read_text())
    assert len(summary['blocks']) == sum(model.backbone.depths)
    assert max(block['forward_error'] for block in summary['blocks']) < 1e-4
    random = tmp_path / 'random'
    args = '--num-queries', 24, '--what', 'sharpness'
    run(monkeypatch, tmp_path / 'config.py', 'none', picture, '--out', random, *args)
    other = json.loads((random / 'summary.json').read_text())
    trained, fresh = (s['blocks'][0]['sharpness']['entropy'] for s in (summary, other))
    assert trained != fresh  # the checkpoint was read


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(config='gone.py'), "config 'gone.py': no such file"),
        (dict(checkpoint='gone.pth'), "checkpoint 'gone.pth': no such file"),
        (dict(image='gone.png'), "image 'gone.png': no such file"),
        (dict(image=__file__), 'cannot be read as a picture'),
        (dict(more=['--query', '200', '10']), 'query 200 10 is outside of photo (140 x 90 pixels)'),
        (dict(more=['--num-queries', '1']), '--num-queries 1 has to be at least 2'),
        (dict(more=['--shape', '16', '64']), '--shape 16 64: height and width have to be at least 32'),
        (dict(more=['--masking', '-4']), '--masking -4'),
        (dict(more=['--device', 'abacus']), '--device abacus'),
        (dict(more=['--masking', '4', '--data-root', 'gone/']), 'the test data cannot be read'),
        (
            dict(more=['--cfg-options', "model.backbone.stage_attns=('rala','rala','rala','ralla')"]),
            "unknown attention 'ralla'",
        ),
    ],
)
def test_bad_input_is_one_line(picture, tmp_path, monkeypatch, capsys, change, message):
    pytest.importorskip('mmpretrain')
    args = dict(config=CLASSIFIER, checkpoint='none', image=picture, more=[])
    args.update(change)
    more = ['--what', 'locality', '--num-queries', '4', *args['more']]
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, args['config'], args['checkpoint'], args['image'], '--out', tmp_path / 'out', *more)
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and error[-1].startswith('error:') and message in error[-1], error


def test_a_checkpoint_of_another_model_is_refused(picture, tmp_path, monkeypatch, capsys):
    pytest.importorskip('mmpretrain')
    torch.save(dict(state_dict={'backbone.stages.0.0.norm1.weight': torch.ones(7)}), tmp_path / 'other.pth')
    with pytest.raises(SystemExit):
        run(monkeypatch, CLASSIFIER, tmp_path / 'other.pth', picture, '--out', tmp_path / 'out')
    assert 'does not fit the backbone of the config' in capsys.readouterr().err


def test_an_upstream_backbone_has_nothing_to_look_into(picture, tmp_path, monkeypatch, capsys):
    pytest.importorskip('mmpretrain')
    config = tmp_path / 'resnet.py'
    config.write_text(
        "_base_ = 'mmpretrain::resnet/resnet18_8xb32_in1k.py'\n"
        "custom_imports = dict(imports=['mmlinattn'], allow_failed_imports=False)\n"
        "default_scope = 'mmpretrain'\n"
    )
    with pytest.raises(SystemExit):
        run(monkeypatch, config, 'none', picture, '--out', tmp_path / 'out')
    assert 'its backbone ResNet has no attention of mmlinattn' in capsys.readouterr().err


@pytest.mark.slow
def test_masking_on_a_data_set(picture, tmp_path, monkeypatch):
    pytest.importorskip('mmpretrain')
    from mmlinattn.datasets import DatasetSpec, write_dataset

    write_dataset(tmp_path / 'data', DatasetSpec('imagenet', 12, 24, size=(64, 64)))
    args = '--what', 'ccs', '--masking', 20, '--data-root', tmp_path / 'data'
    run(monkeypatch, CLASSIFIER, 'none', picture, '--out', tmp_path / 'out', *args)
    masking = json.loads((tmp_path / 'out' / 'summary.json').read_text())['masking']
    assert masking['pictures'] == 20
    assert list(masking['accuracy']) == ['none', '3x3', '9 others', '5x5', '25 others', '7x7', '49 others']
    assert 'masking.png' in written(tmp_path / 'out')
