# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import ARCH, released_ravlt, with_package
from mmengine.runner import load_checkpoint
from torch import nn

from mmlinattn import __version__
from mmlinattn.checkpoints import CheckpointError, LoadReport, convert, load_file, released
from mmlinattn.checkpoints.convert import Conversion, build_model, convert_checkpoint, convert_state, main

TOOL = Path(__file__).parents[1] / 'tools' / 'convert_checkpoint.py'
HEADER = "custom_imports = dict(imports=['mmlinattn'], allow_failed_imports=False)\n"
# Nothing may be fetched to build a model: this name is nobody's.
BACKBONE = (
    f"dict(_delete_=True, type='RAVLT', arch={ARCH}, init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://nobody'))"
)
MODELS = {
    'mmdet mask-rcnn': (
        'mmdet',
        'mask-rcnn_r50_fpn.py',
        f'backbone={BACKBONE}, neck=dict(in_channels={list(ARCH["embed_dims"])})',
    ),
    'mmdet cascade': (
        'mmdet',
        'cascade-mask-rcnn_r50_fpn.py',
        f'backbone={BACKBONE}, neck=dict(in_channels={list(ARCH["embed_dims"])})',
    ),
    'mmdet retinanet': (
        'mmdet',
        'retinanet_r50_fpn.py',
        f'backbone={BACKBONE}, neck=dict(in_channels={list(ARCH["embed_dims"])})',
    ),
    'mmseg fpn': (
        'mmseg',
        'fpn_r50.py',
        f'backbone={BACKBONE}, neck=dict(in_channels={list(ARCH["embed_dims"])}), pretrained=None',
    ),
    'mmseg upernet': (
        'mmseg',
        'upernet_r50.py',
        f'backbone={BACKBONE}, decode_head=dict(in_channels={list(ARCH["embed_dims"])}), '
        "auxiliary_head=dict(in_channels=24), pretrained='mmlinattn://nobody'",
    ),
}


def write_config(folder, name='mmdet mask-rcnn', extra='') -> Path:
    scope, base, model = MODELS[name]
    pytest.importorskip(scope)
    path = folder / 'config.py'
    path.write_text(
        f"_base_ = '{scope}::_base_/models/{base}'\ndefault_scope = '{scope}'\n{HEADER}model = dict({model}{extra})\n"
    )
    return path


def released_model(config) -> dict:
    """The file its authors would have published: old backbone names, today's head names."""
    state = build_model(config).state_dict()
    state = {key: v for key, v in state.items() if not key.startswith('backbone.')}
    state.update({f'backbone.{key}': v for key, v in released_ravlt(dense=True).items()})
    return {'state_dict': state, 'meta': {'CLASSES': ('cat', 'dog'), 'epoch': 12}, 'optimizer': {}}


@pytest.mark.parametrize('name', MODELS)
def test_a_released_model_loads_strictly(tmp_path, name):
    config = write_config(tmp_path, name)
    source, target = tmp_path / 'released.pth', tmp_path / 'ours.pth'
    released = released_model(config)
    torch.save(released, source)
    conversion = convert_checkpoint(source, target, config)
    assert conversion.complete
    model = build_model(config)
    load_checkpoint(model, str(target), strict=True)
    model.load_state_dict(load_file(target)['state_dict'], strict=True)
    stem = model.state_dict()['backbone.patch_embeds.0.layers.0.weight']
    assert torch.equal(stem, released['state_dict']['backbone.patch_embed.proj.0.weight'])


def test_counters_of_batches_may_be_missing(tmp_path):
    """Of old files, and of such that were written by hand; they are no weights."""
    config = write_config(tmp_path)
    released = released_model(config)
    counters = [key for key in released['state_dict'] if key.endswith('num_batches_tracked')]
    for key in counters:
        del released['state_dict'][key]
    torch.save(released, tmp_path / 'released.pth')
    assert counters and convert_checkpoint(tmp_path / 'released.pth', tmp_path / 'ours.pth', config).complete
    assert set(load_file(tmp_path / 'ours.pth')['state_dict']) == set(build_model(config).state_dict())


def test_counters_of_batches_that_a_file_has_are_kept():
    """In the backbone and beside it; one that it lacks is at zero."""
    model = nn.Module()
    model.backbone, model.neck, model.head = (nn.Sequential(nn.BatchNorm2d(4)) for _ in range(3))
    state = {key: torch.full_like(value, 7) for key, value in model.state_dict().items()}
    del state['head.0.num_batches_tracked']
    converted = convert_state(dict(state_dict=state), 'a.pth', model)
    found = {key: int(value) for key, value in converted.state_dict.items() if key.endswith('num_batches_tracked')}
    assert found == {f'{part}.0.num_batches_tracked': n for part, n in (('backbone', 7), ('neck', 7), ('head', 0))}
    assert converted.complete


def test_a_model_has_to_be_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / 'released.pth'), str(tmp_path / 'ours.pth')])
    assert end.value.code == 2 and 'required: --config' in capsys.readouterr().err


def test_the_written_file_says_where_it_comes_from(tmp_path):
    config = write_config(tmp_path)
    torch.save(released_model(config), tmp_path / 'released.pth')
    convert_checkpoint(tmp_path / 'released.pth', tmp_path / 'ours.pth', config)
    meta = load_file(tmp_path / 'ours.pth')['meta']
    assert meta['source'] == 'released.pth' and meta['mmlinattn_version']
    assert meta['dataset_meta'] == {'classes': ('cat', 'dog')}


@pytest.mark.parametrize('age', ['MMCV 1.x', 'MMEngine'])
def test_names_and_colours_of_classes_come_along(tmp_path, age):
    config, meta = write_config(tmp_path), dict(classes=('cat', 'dog'), palette=[(1, 2, 3), (4, 5, 6)])
    old = dict(CLASSES=meta['classes'], PALETTE=meta['palette'])
    released = dict(released_model(config), meta=old if age == 'MMCV 1.x' else dict(dataset_meta=meta))
    torch.save(released, tmp_path / 'released.pth')
    convert_checkpoint(tmp_path / 'released.pth', tmp_path / 'ours.pth', config)
    assert load_file(tmp_path / 'ours.pth')['meta']['dataset_meta'] == meta


def test_norms_of_outputs_the_model_does_not_use_are_dropped_with_a_note(tmp_path, capsys):
    config = write_config(tmp_path)
    torch.save(released_model(config), tmp_path / 'released.pth')
    text = config.read_text().replace("type='RAVLT'", "type='RAVLT', out_indices=(1, 2, 3)")
    widths = list(ARCH['embed_dims'])
    text = text.replace(f'in_channels={widths}', f'in_channels={widths[1:]}, num_outs=4')
    config.write_text(text)
    # The neck has a level less, so that part of the file is left over: only the norm is dropped.
    status = main([str(tmp_path / 'released.pth'), str(tmp_path / 'ours.pth'), '--config', str(config)])
    out, err = capsys.readouterr()
    assert status == 1 and 'backbone.out_norms.0.weight' in out
    assert 'out_norms' not in err and 'neck.lateral_convs.3.conv.weight' in err


@pytest.mark.parametrize('dense', [False, True])
def test_a_backbone_alone_does_not_make_a_detector(tmp_path, capsys, dense):
    config = write_config(tmp_path)
    source, target = tmp_path / 'RAVLT_B.pth', tmp_path / 'ours.pth'
    torch.save({'model': released_ravlt(dense)}, source)
    assert main([str(source), str(target), '--config', str(config)]) == 1
    listed = capsys.readouterr().err.splitlines()
    assert not target.exists()
    assert '  neck.fpn_convs.0.conv.weight' in listed
    assert '  roi_head.bbox_head.fc_cls.weight' in listed
    assert ('  backbone.out_norms.0.weight' in listed) != dense
    assert ('  head.fc.weight' in listed) != dense  # left over from the classifier
    assert listed[-1].startswith('Hint') and str(source) in listed[-1]


def test_a_file_for_other_classes_gets_that_hint(tmp_path, capsys):
    config, source = write_config(tmp_path), tmp_path / 'released.pth'
    state = released_model(config)
    torch.save(state, source)
    write_config(tmp_path, extra=', roi_head=dict(bbox_head=dict(num_classes=3))')
    hint = 'Hint: CONFIG has another number of classes or another size than SRC.'
    assert main([str(source), str(tmp_path / 'ours.pth'), '--config', str(config)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == hint
    del state['state_dict']['neck.fpn_convs.0.conv.weight']  # no longer only that
    torch.save(state, source)
    assert main([str(source), str(tmp_path / 'ours.pth'), '--config', str(config)]) == 1
    listed = capsys.readouterr().err.splitlines()
    assert '  neck.fpn_convs.0.conv.weight' in listed and not any(line.startswith('Hint') for line in listed)


def test_the_tool_writes_a_file(tmp_path):
    config = write_config(tmp_path)
    source, target = tmp_path / 'released.pth', tmp_path / 'ours.pth'
    torch.save(released_model(config), source)
    done = subprocess.run(
        [sys.executable, TOOL, source, target, '--config', config],
        capture_output=True,
        text=True,
        env=with_package(),
    )
    assert done.returncode == 0, done.stderr
    assert 'dropped' in done.stdout and 'RoPE.angle' in done.stdout
    load_checkpoint(build_model(config), str(target), strict=True)


def test_the_tool_exits_non_zero_in_one_line(tmp_path):
    source = tmp_path / 'page.pth'
    source.write_text('<html>Please log in</html>')
    done = subprocess.run(
        [sys.executable, TOOL, source, tmp_path / 'ours.pth', '--config', 'config.py'],
        capture_output=True,
        text=True,
        env=with_package(),
    )
    assert done.returncode != 0 and 'Traceback' not in done.stderr
    assert done.stderr.splitlines()[-1] == f'error: {source} is a web page, not a checkpoint'


@pytest.mark.parametrize(
    'spoil, listed',
    [
        (lambda s: s.pop('rpn_head.rpn_cls.weight'), '  rpn_head.rpn_cls.weight'),
        (lambda s: s.update({'backbone.odd': torch.ones(1)}), '  backbone.odd'),
        (lambda s: s.update({'odd.weight': torch.ones(1)}), '  odd.weight'),
        (
            lambda s: s.update({'roi_head.bbox_head.fc_cls.bias': torch.ones(4)}),
            '  roi_head.bbox_head.fc_cls.bias (4 in the file, 81 in the model)',
        ),
    ],
)
def test_any_key_that_does_not_fit_is_listed_and_nothing_written(tmp_path, capsys, spoil, listed):
    config = write_config(tmp_path)
    released = released_model(config)
    spoil(released['state_dict'])
    source, target = tmp_path / 'released.pth', tmp_path / 'ours.pth'
    torch.save(released, source)
    assert main([str(source), str(target), '--config', str(config)]) == 1
    assert listed in capsys.readouterr().err.splitlines()
    assert not target.exists()


def test_a_converted_file_converts_to_itself(tmp_path):
    config = write_config(tmp_path)
    paths = [tmp_path / f'{i}.pth' for i in range(3)]
    torch.save(released_model(config), paths[0])
    for source, target in zip(paths, paths[1:]):
        assert convert_checkpoint(source, target, config).complete
    first, second = (load_file(path)['state_dict'] for path in paths[1:])
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_bad_targets_are_refused_before_any_work(tmp_path, capsys):
    source = tmp_path / 'released.pth'
    torch.save({'state_dict': {'w': torch.ones(1)}}, source)
    before = source.read_bytes()
    (tmp_path / 'link.pth').symlink_to(source)
    for target in (source, tmp_path / 'link.pth', tmp_path, tmp_path / 'nowhere' / 'ours.pth'):
        with pytest.raises(CheckpointError, match=str(target)):
            convert_checkpoint(source, target, 'there_is_no_such_config.py')
    assert source.read_bytes() == before
    assert main([str(tmp_path / 'missing.pth'), str(tmp_path / 'a'), '--config', 'b.py']) == 1
    assert 'missing.pth does not exist' in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    source, target = tmp_path / 'released.pth', tmp_path / 'ours.pth'
    torch.save(released_model(config), source)
    target.write_text('yesterday')

    def full(*args):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('mmlinattn.checkpoints.convert.os.fsync', full)
    with pytest.raises(CheckpointError, match='No space left'):
        convert_checkpoint(source, target, config)
    assert target.read_text() == 'yesterday'
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'config.py',
        'ours.pth',
        'released.pth',
    ]


def report(loaded=(), missing=(), unexpected=(), mismatched=(), ignored=()):
    return LoadReport(list(loaded), list(missing), list(unexpected), list(mismatched), list(ignored))


@pytest.mark.parametrize(
    'fits, is_complete, lines',
    [
        (dict(loaded=['neck.w'], ignored=['x']), True, []),
        (
            dict(loaded=['backbone.w', 'neck.w'], missing=['a', 'b'], unexpected=['c'], mismatched=['d (1)', 'e (2)']),
            False,
            [
                '2 missing in SRC:',
                '  a',
                '  b',
                '1 left over from SRC:',
                '  c',
                '2 of another shape:',
                '  d (1)',
                '  e (2)',
            ],
        ),
        (
            dict(loaded=['neck.w', 'backbone.w'], mismatched=['d']),
            False,
            ['1 of another shape:', '  d', 'Hint: CONFIG has another number of classes or another size than SRC.'],
        ),
        (dict(missing=['a']), False, ['1 missing in SRC:', '  a']),  # where nothing fits there is nothing to train from
        (
            dict(loaded=['backbone.w', 'backbone.v'], missing=['a']),
            False,
            [
                '1 missing in SRC:',
                '  a',
                'Hint: of this model SRC holds the backbone alone. To train from it nothing needs to be converted: '
                "--cfg-options model.backbone.init_cfg.checkpoint='a.pth'",
            ],
        ),
    ],
)
def test_what_the_tool_prints(tmp_path, monkeypatch, capsys, fits, is_complete, lines):
    conversion = Conversion({key: torch.ones(1) for key in ('v', 'w')}, report(**fits), ['x', 'y'])
    assert conversion.complete is is_complete
    given = []
    monkeypatch.setattr(convert, 'convert_checkpoint', lambda *args: given.append(args) or conversion)
    assert main(['a.pth', 'b.pth', '--config', 'c.py']) == int(not is_complete)
    out, err = capsys.readouterr()
    assert given == [('a.pth', 'b.pth', 'c.py')]
    written = 'wrote b.pth: 2 tensors\n' if is_complete else ''
    dropped = 'dropped (the model derives it or has no such part)'
    assert out == f'{dropped}: x\n{dropped}: y\n{written}'
    first = 'a.pth was not converted: it does not match the model of c.py key by key.'
    assert err.splitlines() == ([] if is_complete else [first, *lines])


@pytest.mark.parametrize('error', [CheckpointError('of the file'), FileNotFoundError('of the file')])
def test_errors_of_the_tool_are_one_line(monkeypatch, capsys, error):
    def fails(*args):
        raise error

    monkeypatch.setattr(convert, 'convert_checkpoint', fails)
    assert main(['a.pth', 'b.pth', '--config', 'c.py']) == 1
    assert capsys.readouterr().err == 'error: of the file\n'


def test_configs_there_is_nothing_to_convert_for(tmp_path, monkeypatch):
    config, scopes = tmp_path / 'config.py', []
    monkeypatch.setattr(convert, 'init_default_scope', scopes.append)
    config.write_text('a = 1\n')
    with pytest.raises(CheckpointError) as found:
        build_model(config)
    assert str(found.value) == f'config {config} has no model'
    config.write_text("model = dict(type='ImgDataPreprocessor')\n")
    with pytest.raises(CheckpointError) as found:
        build_model(config)
    assert str(found.value) == f'the model of {config} has no backbone to convert a file for'
    config.write_text("model = dict(type='ImgDataPreprocessor')\ndefault_scope = 'mmseg'\n")
    with pytest.raises(CheckpointError):
        build_model(config)
    assert scopes == ['mmengine', 'mmseg']  # where types are looked for


def test_a_wrong_argument_of_a_model_is_one_line(tmp_path, monkeypatch, capsys):
    """As in the tools that run it, and with its traceback where that is asked for."""
    config = write_config(tmp_path, extra=', rpn_head=dict(foo=1)')
    torch.save({}, tmp_path / 'a.pth')
    args = [str(tmp_path / 'a.pth'), str(tmp_path / 'b.pth'), '--config', str(config)]
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    assert main(args) == 1
    error = capsys.readouterr().err
    assert error.startswith(f'error: the model of {config} cannot be built: TypeError: ') and error.count('\n') == 1
    assert "unexpected keyword argument 'foo'" in error
    monkeypatch.setenv('MMLINATTN_TRACEBACK', '1')
    with pytest.raises(TypeError):
        main(args)


def test_nothing_is_fetched_to_build_a_model():
    config = dict(a=[dict(init_cfg=1, b=2), (dict(pretrained=3), 'init_cfg')], pretrained=None, keep=dict(c=4))
    assert convert._without_init(config) == dict(a=[dict(b=2), ({}, 'init_cfg')], keep=dict(c=4))


def test_downloads_are_not_written_over(tmp_path, monkeypatch):
    """Nor the file that a name or a link is kept in, which would be loaded by that name from then on."""
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    entry = released.find_released('ravlt_t')
    other = 'https://example.org/models/of_others.pth?download=1'
    kept = {'mmlinattn://ravlt_t': entry.path, entry.link: entry.path}
    for source, path in {**kept, other: tmp_path / 'checkpoints' / 'of_others.pth'}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'as it was fetched')
        with pytest.raises(CheckpointError, match='is SRC itself, which is never overwritten$'):
            convert_checkpoint(source, path, 'no_such_config.py')
        assert path.read_bytes() == b'as it was fetched'
    with pytest.raises(CheckpointError, match='no_such'):
        convert_checkpoint('mmlinattn://no_such', tmp_path / 'b.pth', 'no_such_config.py')


def test_lines_about_bad_targets(tmp_path, monkeypatch):
    source = tmp_path / 'a.pth'
    source.touch()
    for target, line in (
        (tmp_path, f'DST {tmp_path} is a folder; name a file in it'),
        (source, f'DST {source} is SRC itself, which is never overwritten'),
        (tmp_path / 'no' / 'b.pth', f'the folder of DST {tmp_path}/no/b.pth does not exist'),
    ):
        with pytest.raises(CheckpointError) as found:
            convert_checkpoint(source, target, 'no_such_config.py')
        assert str(found.value) == line
    convert._check_target('mmlinattn://ravlt_t', source)  # a file that is there may be replaced
    monkeypatch.setenv('HOME', str(tmp_path))
    for same in ('~/a.pth', f'{tmp_path}/../{tmp_path.name}/a.pth'):
        with pytest.raises(CheckpointError, match='is SRC itself, which is never overwritten$'):
            convert_checkpoint(same, '~/a.pth', 'no_such_config.py')
    asked = []
    monkeypatch.setattr(convert.os, 'access', lambda *args: asked.append(args))
    with pytest.raises(CheckpointError) as found:
        convert_checkpoint(source, tmp_path / 'b.pth', 'no_such_config.py')
    assert str(found.value) == f'the folder of DST {tmp_path}/b.pth cannot be written to'
    assert asked == [(tmp_path, os.W_OK)]


@pytest.mark.parametrize('error', [OSError('disk\nfull'), RuntimeError('disk\nfull')], ids=repr)
def test_what_a_disk_does_is_one_line(tmp_path, monkeypatch, error):
    """PyTorch reports a full one in an error of its own."""

    def fails(*args):
        raise error

    monkeypatch.setattr(convert.torch, 'save', fails)
    with pytest.raises(CheckpointError) as found:
        convert._save({}, tmp_path / 'b.pth')
    assert str(found.value) == f'cannot write {tmp_path}/b.pth: disk' and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'meta, expected',
    [
        (None, None),
        ([1], None),
        (dict(epoch=3), None),
        (dict(dataset_meta=dict(classes=('a',)), CLASSES=('b',)), dict(classes=('a',))),
        (dict(dataset_meta=None, CLASSES=('b',), PALETTE=None), dict(classes=('b',))),
        (dict(PALETTE=[(1, 2, 3)]), dict(palette=[(1, 2, 3)])),
    ],
)
def test_names_of_classes_of_any_age(meta, expected):
    assert convert._dataset_meta(meta) == expected


def test_what_is_written_beside_the_weights(tmp_path, monkeypatch, capsys):
    """Without names of classes the file has no entry for them; a short path is one of the user's home."""
    monkeypatch.setenv('HOME', str(tmp_path))
    model = torch.nn.Module()
    model.backbone = torch.nn.BatchNorm1d(2)
    model.head = torch.nn.Linear(2, 1)
    monkeypatch.setattr(convert, 'build_model', lambda config: model)
    state = {key: torch.full_like(value, 3) for key, value in model.state_dict().items()}
    del state['backbone.num_batches_tracked']
    torch.save(dict(state_dict=state, meta=dict(epoch=3)), tmp_path / 'a.pth')
    conversion = convert_checkpoint(tmp_path / 'a.pth', '~/b.pth', 'configs/c.py')
    assert conversion.complete and conversion.dropped == []
    assert capsys.readouterr().out == ''  # what is said of reading is the tool's to say
    written = load_file(tmp_path / 'b.pth')
    assert written['meta'] == dict(source='a.pth', mmlinattn_version=__version__, config='c.py')
    assert list(written) == ['state_dict', 'meta'] and set(written['state_dict']) == set(model.state_dict())
    assert (written['state_dict']['head.weight'] == 3).all() and (model.backbone.weight == 3).all()
    assert conversion.report.loaded == [key for key in state if key.startswith('backbone')] + [
        'head.weight',
        'head.bias',
    ]
