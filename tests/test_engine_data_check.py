# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import json
import os
from types import SimpleNamespace

import pytest
from engine_toys import ToyDataset, make_runner
from mmengine.config import Config
from mmengine.dataset import ConcatDataset, RepeatDataset
from mmengine.runner import IterBasedTrainLoop

from mmlinattn.engine import DataCheckHook, RunError, annotations, check_data_config, data_check
from mmlinattn.engine.data_check import explained_empty_data, find_missing_files

HOOKS = [dict(type='DataCheckHook', max_listed=2)]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder with the 12 files that ToyDataset names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    for index in range(12):
        (tmp_path / 'folder' / f'{index}.jpg').touch()
    return tmp_path / 'folder'


def test_all_there(pictures, tmp_path):
    make_runner(tmp_path / 'work', HOOKS).train()
    assert (tmp_path / 'work' / 'epoch_2.pth').exists()


def test_missing_images_stop_the_run_before_it_trains(pictures, tmp_path):
    for index in (3, 7, 9):
        (pictures / f'{index}.jpg').unlink()
    runner = make_runner(tmp_path / 'work', HOOKS)
    message = r'train_dataloader \(ToyDataset.*: 3 of the files .* 12 samples .*missing: '
    with pytest.raises(RunError, match=message + r'folder/3.jpg, folder/7.jpg and 1 more\.'):
        runner.train()
    assert runner.iter == 0


def test_a_missing_folder_is_all_its_images(pictures):
    for path in pictures.iterdir():
        path.unlink()
    pictures.rmdir()
    expected = [f'folder/{i}.jpg' for i in range(12)]
    assert find_missing_files(ToyDataset()) == expected
    pictures.touch()  # a file of that name
    assert find_missing_files(ToyDataset()) == expected


@pytest.mark.parametrize('wrap', [lambda d: RepeatDataset(d, 2), lambda d: ConcatDataset([ToyDataset(size=2), d])])
def test_looks_into_wrappers(pictures, tmp_path, wrap):
    (pictures / '5.jpg').unlink()
    runner = make_runner(tmp_path / 'work', HOOKS)
    runner.train_loop.dataloader = runner.build_dataloader(
        dict(dataset=wrap(ToyDataset()), sampler=dict(type='DefaultSampler'), batch_size=4)
    )
    with pytest.raises(RunError, match='folder/5.jpg'):
        runner.train()


def test_an_empty_data_set_is_an_error(pictures, tmp_path):
    runner = make_runner(tmp_path / 'work', HOOKS)
    runner.train_loop.dataloader.dataset.size = 0
    runner.train_loop.dataloader.dataset.data_address = []
    runner.train_loop.dataloader.dataset.ann_file = 'train/a.json'
    with pytest.raises(RunError) as found:
        runner.train()
    assert str(found.value) == "train_dataloader (ToyDataset, ann_file 'train/a.json') holds no image."


def test_lists_each_folder_once(pictures, monkeypatch):
    """118 thousand images have to take seconds on a network disk."""
    scans = []
    scandir = os.scandir
    monkeypatch.setattr(os, 'scandir', lambda path: scans.append(path) or scandir(path))
    monkeypatch.setattr(os, 'stat', None)
    assert find_missing_files(ToyDataset()) == []
    assert scans == ['folder']


def coco_config(root, **kwargs):
    leaf = dict(
        type='CocoDataset',
        data_root=str(root),
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
    )
    leaf.update(kwargs)
    evaluator = dict(type='CocoMetric', ann_file=f'{root}/annotations/train.json')
    return Config(
        dict(
            train_dataloader=dict(dataset=dict(type='RepeatDataset', times=2, dataset=leaf)),
            val_dataloader=dict(dataset=dict(leaf)),
            val_evaluator=evaluator,
        )
    )


@pytest.fixture
def coco_root(tmp_path):
    (tmp_path / 'coco' / 'annotations').mkdir(parents=True)
    (tmp_path / 'coco' / 'train').mkdir()
    (tmp_path / 'coco' / 'annotations' / 'train.json').write_text('{}')
    return tmp_path / 'coco'


def test_config_of_a_data_set_that_is_there(coco_root):
    check_data_config(coco_config(coco_root), ['train', 'val'])


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(data_root='/no/such'), "train_dataloader.dataset.dataset.data_root = '/no/such'"),
        (dict(ann_file='a.json'), "train_dataloader.dataset.dataset.ann_file = 'a.json'"),
        (
            dict(data_prefix=dict(img='x/')),
            "train_dataloader.dataset.dataset.data_prefix.img = 'x/'",
        ),
    ],
)
def test_config_naming_what_is_not_there(coco_root, change, message):
    with pytest.raises(RunError, match=message):
        check_data_config(coco_config(coco_root, **change), ['train'])


def test_config_of_an_evaluator(coco_root):
    cfg = coco_config(coco_root)
    cfg.val_evaluator.ann_file = 'elsewhere.json'
    with pytest.raises(RunError, match="val_evaluator.ann_file = 'elsewhere.json'"):
        check_data_config(cfg, ['train', 'val'])
    check_data_config(cfg, ['train'])


@pytest.mark.parametrize('change', [dict(data_root='s3://bucket/coco'), dict(backend_args=dict(backend='petrel'))])
def test_config_of_remote_data_is_not_checked(coco_root, change):
    change = dict(dict(data_root='/no/such'), **change)
    check_data_config(coco_config(coco_root, **change), ['train'])


def empty_config(names, image_ids=(1, 2)):
    """A loader of two data sets: one that has images left, then one of the classes ``names``."""
    pytest.importorskip('mmdet')
    objects = [dict(id=i, image_id=i, category_id=1, bbox=[1, 1, 5, 5], area=25, iscrowd=0) for i in image_ids]
    images = [dict(id=i, file_name=f'{i}.jpg', width=64, height=64) for i in image_ids]
    with open('coco.json', 'w') as stream:
        json.dump(dict(images=images, annotations=objects, categories=[dict(id=1, name='disc')]), stream)
    leaf = dict(
        type='mmdet.CocoDataset',
        ann_file='coco.json',
        data_prefix=dict(img='pictures'),
        metainfo=dict(classes=('disc',)),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
    )
    datasets = [leaf, dict(leaf, metainfo=dict(classes=names))]
    return Config(dict(train_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=datasets))))


def test_why_a_data_set_is_empty(tmp_path, monkeypatch):
    """MMEngine fails in NumPy."""
    monkeypatch.chdir(tmp_path)
    cfg = empty_config(('star',))
    with pytest.raises(RunError) as found, explained_empty_data(cfg, ['train', 'val']):
        raise ValueError('need at least one array to concatenate')
    message = str(found.value)
    assert message.startswith("train_dataloader.dataset.datasets.1: none of the 2 images of 'coco.json' is left after ")
    assert "filter_cfg = {'filter_empty_gt': True, 'min_size': 32}" in message
    assert "metainfo.classes = ('star',)" in message


def test_an_error_over_data_that_is_there_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cfg, kind in [(empty_config(('disc',)), ValueError), (empty_config(('star',)), TypeError)]:
        with pytest.raises(kind, match='of another kind'), explained_empty_data(cfg, ['train']):
            raise kind('of another kind')


def test_a_file_that_names_no_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="datasets.0: 'coco.json' in data_root None names no image"):
        with explained_empty_data(empty_config(('disc',), image_ids=()), ['train']):
            raise ValueError


@pytest.mark.parametrize(
    'change, line',
    [
        (
            dict(data_root='/no/such'),
            "data_root = '/no/such': no such folder. It has to be the root of the data set, holding "
            "'annotations/train.json', 'train/'.",
        ),
        (
            dict(data_root='/no/such', ann_file='', data_prefix=''),
            "data_root = '/no/such': no such folder. It has to be the root of the data set.",
        ),
        (
            dict(ann_file='a.json'),
            "ann_file = 'a.json': no such file '{root}/a.json'. The path is relative to data_root unless it is "
            'absolute.',
        ),
        (
            dict(data_prefix=dict(img='train/', seg='x/')),
            "data_prefix.seg = 'x/': no such folder '{root}/x/'. The path is relative to data_root unless it is "
            'absolute.',
        ),
        (
            dict(data_prefix='x'),
            "data_prefix = 'x': no such folder '{root}/x'. The path is relative to data_root unless it is absolute.",
        ),
        (
            dict(data_prefix=dict(img='annotations/train.json')),  # a file in its place
            "data_prefix.img = 'annotations/train.json': no such folder '{root}/annotations/train.json'. The path is "
            'relative to data_root unless it is absolute.',
        ),
        (
            dict(data_root=__file__),
            f'data_root = {__file__!r}: no such folder. It has to be the root of the data set, holding '
            "'annotations/train.json', 'train/'.",
        ),
        (
            dict(type='mmpretrain.ImageNet', data_prefix=None, split='x'),
            "split = 'x': no such folder '{root}/x'. The path is relative to data_root unless it is absolute.",
        ),
    ],
)
def test_whole_lines_about_a_config(coco_root, change, line):
    cfg = coco_config(coco_root, **change)
    with pytest.raises(RunError) as found:
        check_data_config(cfg, ['val'])
    assert str(found.value) == f'val_dataloader.dataset.{line.format(root=coco_root)}'
    check_data_config(cfg, ['test'])  # which is not there


@pytest.mark.parametrize(
    'change',
    [
        dict(type='CUB', data_prefix='', split='test'),
        dict(type='VOC', data_prefix=dict(img_path='train'), split='trainval'),
        dict(type='ImageNet', data_prefix='train', split='val'),  # the folder that is given
        dict(type='mmpretrain.CIFAR10', data_root='/not/yet', data_prefix='', ann_file='', split='train'),
        dict(ann_file=['annotations/train.json', 'annotations/train.json']),
    ],
)
def test_what_upstreams_data_sets_find_by_themselves(coco_root, change):
    """By the name of a split, most choose a list; small ones are downloaded."""
    check_data_config(coco_config(coco_root, **change), ['val'])


@pytest.mark.parametrize(
    ('change', 'line'),
    [
        (dict(type='CIFAR10', download=False, data_root='/not/yet'), "data_root = '/not/yet': no such folder"),
        (dict(ann_file=['annotations/train.json', 'x.json']), "ann_file = 'x.json': no such file"),
    ],
)
def test_what_they_do_not_find(coco_root, change, line):
    with pytest.raises(RunError, match=f'val_dataloader.dataset.{line}'):
        check_data_config(coco_config(coco_root, **change), ['val'])


def test_paths_that_are_absolute_or_elsewhere(coco_root):
    path = f'{coco_root}/annotations/train.json'
    check_data_config(coco_config(coco_root, ann_file=path, data_prefix=dict(img=f'{coco_root}/train')), ['train'])
    check_data_config(coco_config(coco_root, ann_file='s3://a/b.json', data_prefix=dict(img='s3://a/')), ['train'])
    cfg = coco_config(coco_root)
    cfg.val_evaluator = [dict(type='A'), dict(type='B', ann_file=path), dict(type='C', ann_file='no.json')]
    with pytest.raises(RunError) as found:
        check_data_config(cfg, ['val'])
    assert str(found.value) == (
        "val_evaluator.ann_file = 'no.json': no such file. It has to be the annotation file of val_dataloader, and is "
        'not relative to data_root.'
    )
    cfg.val_evaluator[2].ann_file = f'{coco_root}/annotations'  # a folder
    with pytest.raises(RunError, match='val_evaluator.ann_file = .*/annotations.: no such file'):
        check_data_config(cfg, ['val'])
    cfg.val_evaluator[2].backend_args = dict(backend='petrel')
    check_data_config(cfg, ['val'])


@pytest.mark.parametrize('rank', [None, 'RANK', 'SLURM_PROCID'])
def test_annotations_are_read_by_one_process(coco_root, monkeypatch, capsys, rank):
    for name in ('RANK', 'SLURM_PROCID', 'LOCAL_RANK'):
        monkeypatch.delenv(name, raising=False)
    if rank:
        monkeypatch.setenv(rank, '1')
    read = []
    monkeypatch.setattr(data_check, 'check_annotations', lambda *args: read.append(args) or ['is odd', 'is old'])
    masks, boxes = (dict(type=kind, with_mask=kind == 'LoadAnnotations') for kind in ('LoadAnnotations', 'Resize'))
    cfg = coco_config(coco_root, pipeline=[boxes, dict(type='LoadAnnotations'), masks])
    cfg.val_dataloader.dataset.pipeline = [dict(type='mmdet.LoadAnnotations'), dict(type='Pack', with_mask=True)]
    cfg.val_dataloader.dataset.metainfo = classes = dict(classes=('disc',))
    check_data_config(cfg, ['train', 'val'])
    assert read == []  # not MMDetection's
    cfg.default_scope = 'mmdet'
    check_data_config(cfg, ['train', 'val'])
    path = f'{coco_root}/annotations/train.json'
    expected = [
        ('CocoDataset', path, 'train_dataloader.dataset.dataset.ann_file', True, True, None, None),
        ('CocoDataset', path, 'val_dataloader.dataset.ann_file', False, False, None, classes),
    ]
    assert read == ([] if rank else expected)
    assert capsys.readouterr().err == ('' if rank else 2 * 'notice: is odd\nnotice: is old\n')

    class LoadAnnotations:  # a type in place of its name, as configs in pure Python have it
        pass

    cfg.val_dataloader.dataset.pipeline = [dict(type=LoadAnnotations, with_mask=True)]
    cfg.val_dataloader.dataset.backend_args = dict(backend='petrel')
    check_data_config(cfg, ['val'])
    assert len(read) == len(expected) * (not rank)  # files elsewhere are not read
    del cfg.val_dataloader.dataset.backend_args
    check_data_config(cfg, ['val'])
    assert read[2:] == ([] if rank else [(*expected[1][:3], True, *expected[1][4:])])


@pytest.mark.parametrize('rank, task, reads', [('0', '1', True), ('1', '0', False)])
def test_the_rank_of_torchrun_counts_within_one_task_of_slurm(coco_root, monkeypatch, rank, task, reads):
    monkeypatch.setenv('RANK', rank)
    monkeypatch.setenv('SLURM_PROCID', task)
    read = []
    monkeypatch.setattr(data_check, 'check_annotations', lambda *args: read.append(args) or [])
    cfg = coco_config(coco_root)
    cfg.default_scope = 'mmdet'
    check_data_config(cfg, ['train'])
    assert len(read) == reads


def test_what_the_hook_does_unless_told_otherwise():
    """As in its documentation."""
    hook = DataCheckHook()
    assert (hook.max_listed, hook.num_read, hook.unreadable) == (5, 100, 'stop')
    assert DataCheckHook(num_read=None).num_read is None and DataCheckHook(num_read=0).num_read == 0
    assert hook._listed('abcdef') == 'a, b, c, d, e and 1 more.' and hook._listed('abcde') == 'a, b, c, d, e.'
    with pytest.raises(ValueError, match=r"^DataCheckHook: unreadable='no' has to be 'stop' or 'skip'$"):
        DataCheckHook(unreadable='no')
    with pytest.raises(ValueError, match=r'^DataCheckHook: num_read=-1 has to be at least 0, or None for all samples$'):
        DataCheckHook(num_read=-1)


def test_the_hook_looks_at_annotations_where_no_tool_did(coco_root, monkeypatch):
    read, warnings = [], []
    monkeypatch.setattr(data_check, 'check_annotations', lambda *args: read.append(args) or ['is odd'])
    path = str(coco_root / 'annotations' / 'train.json')

    class Coco:
        backend_args = dict(backend='local')
        pipeline = SimpleNamespace(transforms=[SimpleNamespace(with_mask=False), SimpleNamespace(with_mask=True)])
        ann_file = path
        metainfo = dict(classes=('disc',))

    runner = SimpleNamespace(
        cfg=Config(dict(default_scope='mmdet')), logger=SimpleNamespace(warning=lambda line: warnings.append(line))
    )
    for stage in ('train', 'test'):
        DataCheckHook._check_annotations(runner, Coco(), stage)
    key, backend = '{}_dataloader.dataset.ann_file', dict(backend='local')
    assert read == [
        (Coco, path, key.format('train'), True, True, backend, Coco.metainfo),
        (Coco, path, key.format('test'), True, False, backend, Coco.metainfo),
    ]
    assert warnings == ['is odd'] * 2
    Coco.ann_file = 's3://bucket/train.json'
    DataCheckHook._check_annotations(runner, Coco(), 'train')
    Coco.ann_file, runner.cfg.default_scope = path, 'mmseg'
    DataCheckHook._check_annotations(runner, Coco(), 'train')
    assert len(read) == 2


def test_the_hook_reads_annotations_of_each_data_set(pictures, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        DataCheckHook,
        '_check_annotations',
        staticmethod(lambda runner, dataset, stage: seen.append((len(dataset), stage))),
    )
    runner = make_runner(tmp_path / 'work', HOOKS)
    both = ConcatDataset([ToyDataset(size=2), ToyDataset(size=3)])
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.train_loop.dataloader = runner.build_dataloader(
        dict(dataset=both, sampler=dict(type='DefaultSampler'), batch_size=4)
    )
    loop = type(runner.train_loop)
    runner._test_loop = loop(runner, runner.build_dataloader(runner._train_dataloader), max_epochs=1)
    runner.call_hook('before_run')
    assert seen == [(2, 'train'), (3, 'train'), (12, 'test')]
    (pictures / '11.jpg').unlink()
    monkeypatch.setattr(data_check, 'is_main_process', lambda: False)
    runner.call_hook('before_run')  # others leave it to the main process
    monkeypatch.setattr(data_check, 'is_main_process', lambda: True)
    with pytest.raises(
        RunError, match=r'^test_dataloader \(ToyDataset.* 1 of the files its 12 samples name are missing'
    ):
        runner.call_hook('before_run')


def test_label_files_are_looked_for_where_they_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'maps').mkdir()
    for name in ('0.png', 'maps/2.png'):
        (tmp_path / name).touch()

    class LoadAnnotations:
        def __init__(self, **attributes):
            vars(self).update(attributes)

    def missing(*transforms, **attributes):
        class Maps(list):
            pipeline = SimpleNamespace(transforms=transforms)

            def get_data_info(self, index):
                return self[index]

        first = dict(img_path='0.png', seg_map_path='folder/0_map.png')
        made = Maps([first, dict(img_path='s3://b/1.png'), dict(img_path='2.png', seg_map_path='maps/2.png')])
        vars(made).update(attributes)
        return find_missing_files(made)

    seen = ['2.png', 'folder/0_map.png']  # of all folders, also of those before one that is complete
    assert missing(LoadAnnotations(with_seg=True)) == missing(LoadAnnotations()) == seen
    assert missing(SimpleNamespace(loading=LoadAnnotations(with_seg=True))) == seen  # as the hook leaves it behind
    assert missing(LoadAnnotations(with_seg=False)) == missing() == seen[:1]
    assert missing(LoadAnnotations(), backend_args=dict(backend='petrel')) == []
    assert find_missing_files([1]) == []


def test_what_a_file_is_listed_as():
    assert annotations.listed(['a.', 'b'], separator='; ') == 'a; b.'
    assert annotations.listed(list(range(8)), max_listed=3) == '0, 1, 2 and 5 more.'
    quoted = annotations._quoted('x' * 100)
    assert quoted == "'" + 'x' * 79 + '...' and annotations._quoted('x' * 78) == repr('x' * 78)


def test_an_error_that_cannot_be_explained_stays():
    cfg = Config(dict(train_dataloader=dict(dataset=dict(type='NoSuchDataset'))))
    with pytest.raises(ValueError, match='^of another kind$'), explained_empty_data(cfg, ['train']):
        raise ValueError('of another kind')


def test_workers_start_with_the_first_batch():
    def loop(num_workers):
        loader = SimpleNamespace(num_workers=num_workers, _iterator='of a worker')
        return SimpleNamespace(dataloader=loader, dataloader_iterator=Endless(loader))

    class Endless:
        made = 0

        def __init__(self, loader):
            Endless.made += 1
            self.loader = loader

        def __next__(self):
            return self.loader

    late = loop(2)
    data_check.start_workers_late(late)
    first = late.dataloader_iterator
    data_check.start_workers_late(late)
    assert late.dataloader_iterator is first and late.dataloader._iterator is None and Endless.made == 1
    assert iter(first) is first and next(first) is next(first) is late.dataloader and Endless.made == 2
    same = loop(0)
    data_check.start_workers_late(same)
    assert isinstance(same.dataloader_iterator, Endless) and same.dataloader._iterator == 'of a worker'


def test_data_sets_in_wrappers_of_others():
    inner, other = ToyDataset(size=1), ToyDataset(size=2)
    wrapped = SimpleNamespace(datasets=[SimpleNamespace(_dataset=inner), SimpleNamespace(dataset=other)])
    assert list(data_check._leaf_datasets(wrapped)) == [inner, other]
    twice = SimpleNamespace(dataset=SimpleNamespace(_dataset=wrapped))
    assert list(data_check._leaf_datasets(twice)) == [inner, other]


def test_configs_in_wrappers_of_wrappers(coco_root):
    leaf = coco_config(coco_root).val_dataloader.dataset
    for place, wrap in (
        ('datasets.1.dataset', lambda bad: dict(datasets=[leaf, dict(dataset=bad)])),
        ('dataset.datasets.0', lambda bad: dict(dataset=dict(datasets=[bad, leaf]))),
        ('datasets.0.datasets.1', lambda bad: dict(datasets=[dict(datasets=(leaf, bad))])),
    ):
        cfg = Config(dict(val_dataloader=dict(dataset=wrap(dict(leaf, ann_file='a.json')))))
        with pytest.raises(RunError) as found:
            check_data_config(cfg, ['val'])
        assert str(found.value).startswith(f"val_dataloader.dataset.{place}.ann_file = 'a.json': no such file ")


@pytest.mark.parametrize('stage, may_skip', [('train', True), ('val', False), ('test', False)])
def test_what_is_done_with_each_data_set(pictures, tmp_path, monkeypatch, stage, may_skip):
    """Its files and annotations are looked for, it is watched, and samples are read, in this order."""
    seen, hook = [], DataCheckHook(unreadable='skip')
    for name in ('_check_presence', '_check_annotations', '_check_samples'):
        monkeypatch.setattr(hook, name, lambda *args, name=name: seen.append((name, *args)))
    monkeypatch.setattr(data_check, 'watch_loading', lambda *args: seen.append(('watch', *args)))
    monkeypatch.setattr(data_check, 'allowed_labels', lambda model: f'labels of {model}')
    loop = IterBasedTrainLoop.__new__(IterBasedTrainLoop)
    data = ToyDataset()
    loop.dataloader, started = SimpleNamespace(dataset=data), []
    monkeypatch.setattr(data_check, 'start_workers_late', started.append)
    loops = {f'_{name}_loop': loop if name == stage else dict() for name in ('train', 'val', 'test')}
    runner = SimpleNamespace(log_dir='logs', model='a model', **loops)
    hook.before_run(runner)
    key, listing = f'{stage}_dataloader', os.path.join('logs', 'unreadable_files.txt')
    assert hook.skipped_list == listing and started == [loop]
    watched = ('watch', data, 'labels of a model', listing if may_skip else None)
    assert seen == [
        ('_check_presence', data, key),
        ('_check_annotations', runner, data, stage),
        watched,
        ('_check_samples', data, key, may_skip),
    ]
    seen.clear()
    monkeypatch.setattr(data_check, 'is_main_process', lambda: False)
    hook.before_run(runner)
    assert seen == [watched]
    stopping = DataCheckHook()
    monkeypatch.setattr(data_check, 'watch_loading', lambda *args: seen.append(args[2]))
    stopping.before_run(runner)
    assert stopping.skipped_list is None and seen[1:] == [None]


def test_whole_lines_about_empty_data(monkeypatch):
    """Data are built without their pictures, then without the filter; what is not empty is passed over."""
    built, sizes = [], {}

    def build(cfg):
        built.append(cfg)
        made = ToyDataset(size=0)
        made._metainfo = dict(classes=('a',))
        monkeypatch.setattr(type(made), '__len__', lambda self: sizes[built[-1]['name'], 'filter_cfg' in built[-1]])
        return made

    monkeypatch.setattr(data_check, 'DATASETS', SimpleNamespace(build=build))
    leaves = [dict(name=name, data_prefix='p', data_root='r', pipeline=[1]) for name in ('full', 'empty')]
    cfg = Config(dict(val_dataloader=dict(dataset=dict(datasets=leaves))))
    sizes.update({('full', False): 1, ('empty', False): 0, ('empty', True): 3})
    key = 'val_dataloader.dataset.datasets.1'
    for everything, line in (
        (
            3,
            f"{key}: none of the 3 images of 'p' is left after filter_cfg = {{}}. The class names searched for are "
            "metainfo.classes = ('a',); they have to be the category names of the annotation file.",
        ),
        (0, f"{key}: 'p' in data_root 'r' names no image."),
    ):
        built.clear()
        sizes['empty', True] = everything
        with pytest.raises(RunError) as found, explained_empty_data(cfg, ['train', 'val']):
            raise ValueError
        assert str(found.value) == line
        bare = [dict(leaf, serialize_data=False, pipeline=[]) for leaf in leaves]
        assert built == [*bare, dict(bare[1], filter_cfg=None)]
