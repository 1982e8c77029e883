# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the page of attention_app.py is made of: its rows, its pictures, its words, and what its controls do."""

import contextlib
import runpy
import sys
import types
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from config_helpers import ROOT
from mmengine.config import Config
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import nn

from mmlinattn.analysis import looking, pictures
from mmlinattn.analysis.loading import Picture
from mmlinattn.utils.errors import RunError

TOOL = ROOT / 'tools' / 'analysis_tools' / 'attention_app.py'


def test_a_row_of_numbers():
    """Means over the heads, under the titles of the columns; empty where a block has no such thing."""
    entry = dict(
        block='backbone.stages.0.1',
        mixer='rala',
        map=[16, 24],
        rank=dict(state=dict(effective=[2, 3], at_most=32), output=dict(effective=[4, 5.5], at_most=20)),
        locality=dict(share=[0.25, 0.5], sum=[9, 9], if_uniform=0.125),
        sharpness=dict(entropy=[1, 3], entropy_if_uniform=4),
    )
    row = ['stages.0.1', 'rala', '16 x 24', '2.5 of 32', '4.8 of 20', '0.375', '0.125', '0.500']
    assert looking.numbers(entry) == row and len(looking.COLUMNS) == len(row)
    assert looking.COLUMNS == (
        *('block', 'attention', 'map', 'state rank', 'output rank', 'in 3x3', 'if uniform', 'entropy / log keys'),
    )
    del entry['rank']['state'], entry['locality']
    entry['sharpness'] = dict(entropy=[0.0], entropy_if_uniform=0.0)  # a single key
    assert looking.numbers(entry) == [*row[:3], '', row[4], '', '', '0.000']


def shown(height, width):
    return Picture('p', np.full((height, width, 3), 100, np.uint8), torch.zeros(1, 3, height, width), None, (), ())


def test_maps_side_by_side(monkeypatch):
    """A row a block and a column a head, eight at most; what stands over which panel, and the mark in each."""
    written, marks = [], []
    monkeypatch.setattr(cv2, 'putText', lambda image, text, at, *_: written.append((text, at)))
    monkeypatch.setattr(cv2, 'drawMarker', lambda image, at, colour, *_: marks.append((image.shape, at, colour)))
    maps = np.zeros((10, 2, 4))
    maps[:, 0, 0] = np.arange(10)
    many = pictures.QueryMaps('backbone.stages.0.0', 'rala', maps, (0, 0), (2, 4), np.zeros(10))
    one = pictures.QueryMaps('backbone.stages.1.0', 'hydra', maps[:1], (0, 0), (1, 2), np.zeros(1))
    canvas = looking.mosaic([many, one], shown(64, 128), 96, 16)
    assert canvas.shape == (40 + 2 * (66 + 16 + 4), 150 + 9 * (132 + 4), 3) and canvas.dtype == np.uint8
    assert marks == [((66, 132, 3), (99, 16), (0, 200, 0))] * 11  # 96 * 132 / 128, 16 * 66 / 64
    heads = [0, 1, 3, 4, 5, 6, 8, 9]
    titles = ['mean, max 4.5', *(f'head {i}, max {i}' for i in heads)]
    assert [text for text, _ in written] == [
        *('stages.0.0', 'rala, 2 x 4', *titles),
        *('stages.1.0', 'hydra, 1 x 2', 'mean, max 0', 'head 0, max 0'),
    ]
    places = dict(written)
    assert places['stages.0.0'] == (4, 70) and places['rala, 2 x 4'] == (4, 88)
    assert places['mean, max 4.5'] == (150, 52) and places['head 9, max 9'] == (150 + 8 * 136, 52)
    assert places['stages.1.0'] == (4, 156) and places['head 0, max 0'] == (286, 138)
    panel = canvas[56:122, 150:282].astype(int)  # the mean: red at its upper left, grey elsewhere
    assert panel[5, 5, 0] > panel[5, 5, 2] + 50 and np.ptp(panel[50, 100]) <= 2 and panel[50, 100, 0] < 250
    assert (canvas[142:208, 286:418] < 250).all() and (canvas[142:208, 422:] == 255).all()  # one head, then nothing


def test_flat_pictures_and_long_names_have_room(monkeypatch):
    """Panels are 24 pixels high at least; of a name as much as fits beside them."""
    written = []
    monkeypatch.setattr(cv2, 'putText', lambda image, text, at, *_: written.append(text))
    maps = pictures.QueryMaps('backbone.' + 'abcdefghij' * 3, 'rala', np.zeros((1, 1, 8)), (0, 0), (1, 8), np.zeros(1))
    marks = []
    monkeypatch.setattr(cv2, 'drawMarker', lambda image, at, *_: marks.append(at))
    canvas = looking.mosaic([maps], shown(8, 800), 400, 4)
    assert marks == [(66, 12)] * 2  # in the middle, of panels that are stretched
    assert canvas.shape == (40 + 24 + 16 + 4, 150 + 2 * 136, 3) and written[0] == 'abcdefghijabcdefghijab'


class Says(nn.Module):
    def __init__(self, classes=None, **found) -> None:
        super().__init__()
        self.weight, self.dataset_meta, self.asked = nn.Parameter(torch.zeros(1)), dict(classes=classes), []
        self.sample = BaseDataElement(**found)

    def forward(self, inputs, samples, mode):
        self.asked.append((inputs, samples, mode))
        return [self.sample]


def predicted(model, image):
    picture = Picture('', image, torch.zeros(1, 3, 4, 4), 'sample', (), ())
    before = image.copy()
    words, drawn = looking.predict(model, picture, image)
    assert np.array_equal(image, before) and drawn.shape == image.shape and drawn.dtype == np.uint8
    ((inputs, samples, mode),) = model.asked
    assert inputs is picture.inputs and samples == ['sample'] and mode == 'predict'
    return words, drawn


def test_the_three_best_classes():
    image = np.zeros((20, 30, 3), np.uint8)
    scores = torch.tensor([0.1, 0.5, 0.05, 0.35])
    words, drawn = predicted(Says('abc', pred_score=scores), image)
    assert words == 'b: 0.50, class 3: 0.35, a: 0.10' and np.array_equal(drawn, image)
    assert predicted(Says(pred_score=torch.tensor([0.25, 0.75])), image)[0] == 'class 1: 0.75, class 0: 0.25'
    assert predicted(Says(), image) == ('', pytest.approx(image))


def test_boxes_are_drawn_where_they_are(monkeypatch):
    """From a score of 0.3 on, rounded to pixels; the surest words last, over the others."""
    labels = []
    monkeypatch.setattr(looking, '_label', lambda image, words, at: labels.append((words, at)))
    boxes = torch.tensor([[4.6, 3.4, 20.2, 15.7], [30, 5, 36, 18], [1, 1, 3, 3]])
    found = InstanceData(bboxes=boxes, labels=torch.tensor([0, 1, 0]), scores=torch.tensor([0.75, 0.3, 0.29]))
    words, drawn = predicted(Says('ab', pred_instances=found), np.zeros((24, 40, 3), np.uint8))
    assert words == '2 found with a score of 0.3 or more. a: 0.75, b: 0.30'
    assert labels == [('b: 0.30', (30, 5)), ('a: 0.75', (5, 3))]
    orange = (drawn == (255, 60, 0)).all(axis=-1)
    for row, column in ((3, 12), (16, 12), (9, 5), (9, 20), (5, 33), (18, 33)):
        assert orange[row, column]
    assert not orange[9, 12] and not orange[2, 2] and not drawn[9, 12].any()
    none = InstanceData(bboxes=boxes[:0], labels=torch.zeros(0).long(), scores=torch.zeros(0))
    assert predicted(Says(pred_instances=none), np.zeros((24, 40, 3), np.uint8))[0].startswith('0 found')


def test_segments_are_coloured_and_named_inside(monkeypatch):
    """Half of the picture, half of a colour a class; names in the middle of what covers a hundredth or more."""
    labels = []
    monkeypatch.setattr(looking, '_label', lambda image, words, at: labels.append((words, at)))
    data = torch.zeros(1, 20, 40, dtype=torch.long)
    data[..., 30:] = 2
    data[0, 0, :2] = 1  # 2 of 800 pixels
    image = np.full((40, 80, 3), 200, np.uint8)
    words, drawn = predicted(Says('abc', pred_sem_seg=PixelData(data=data)), image)
    assert words == 'a: 75% of the pixels, c: 25% of the pixels, b: 0% of the pixels'
    assert [name for name, _ in labels] == ['a', 'c']
    for (_, (x, y)), (low, high) in zip(labels, ((0, 60), (60, 80))):
        assert low <= x < high and abs(y - 20) <= 1 and abs(x - (low + high) / 2) <= 1
    assert (drawn[10:, :59] == drawn[10, 0]).all() and (drawn[:, 61:] == drawn[0, 79]).all()
    assert (drawn[10, 0] != drawn[10, 70]).any() and (drawn >= 100 + 20).all()  # half of 200, half of 40 or more


def test_a_hundredth_of_the_picture_has_a_name_on_it(monkeypatch):
    labels = []
    monkeypatch.setattr(looking, '_label', lambda image, words, at: labels.append((words, at)))
    data = torch.zeros(1, 10, 10, dtype=torch.long)
    data[0, 2, 7] = 1
    words, _ = predicted(Says('ab', pred_sem_seg=PixelData(data=data)), np.zeros((10, 10, 3), np.uint8))
    assert words == 'a: 99% of the pixels, b: 1% of the pixels' and labels[1] == ('b', (7, 2))
    # colours for classes without a name, too
    words, _ = predicted(Says('a', pred_sem_seg=PixelData(data=data)), np.zeros((10, 10, 3), np.uint8))
    assert words == 'a: 99% of the pixels, class 1: 1% of the pixels' and labels[3] == ('class 1', (7, 2))


def test_labels_stay_inside_of_the_picture():
    (width, height), below = cv2.getTextSize('ab: 0.90', cv2.FONT_HERSHEY_SIMPLEX, 0.3, 1)
    for at, (left, top) in {
        (50, 40): (50, 40 - height),
        (-5, -5): (0, 0),
        (250, 150): (200 - width, 100 - below - height),
    }.items():
        image = np.full((100, 200, 3), 128, np.uint8)
        looking._label(image, 'ab: 0.90', at)
        rows, columns = np.nonzero((image != 128).any(axis=-1))
        assert (columns.min(), rows.min()) == (left, top)
        assert (columns.max(), rows.max()) == (min(left + width, 199), min(top + height + below, 99))
        assert (image == 255).any() and (image == 0).any()  # white on black


def test_letters_that_opencv_does_not_have(monkeypatch):
    written = []
    monkeypatch.setattr(cv2, 'putText', lambda image, words, at, face, scale, *_: written.append((words, scale)))
    for width in (100, 400, 1600):
        looking._label(np.zeros((50, width, 3), np.uint8), 'grüße', (0, 20))
    assert written == [('gr??e', 0.3), ('gr??e', 0.5), ('gr??e', 0.6)]


def test_what_the_page_calls_a_stage():
    assert looking.describe('stage 3', 'softmax') == (2, 'softmax')
    for missing in ((None, 'softmax'), ('stage 3', None), ('', ''), (None, None)):
        assert looking.describe(*missing) == (0, '')


# --- a looker with small models ---------------------------------------------------------------------------------------


@pytest.fixture
def looker(monkeypatch):
    """Of a model of three stages whose backbone is only said to run."""
    made = []

    def load_model(cfg, checkpoint, device, backbone=None):
        attns = (backbone or {}).get('stage_attns', [['rala'], ['rala', 'rala'], ['softmax']])
        made.append((checkpoint, device, attns))
        return SimpleNamespace(backbone=SimpleNamespace(block_attns=attns), number=len(made))

    monkeypatch.setattr(looking.loading, 'load_model', load_model)
    found = looking.Looker(Config(dict()), 'file.pth', 'cuda:1')
    found.made = made
    return found


def test_attentions_are_switched_one_stage_at_a_time(looker):
    from mmlinattn.attention import TOKEN_MIXERS

    assert looker.made == [('file.pth', 'cuda:1', [['rala'], ['rala', 'rala'], ['softmax']])]
    assert looker.stages == ['stage 1', 'stage 2', 'stage 3']
    assert looker.mixers == sorted(TOKEN_MIXERS.module_dict) and 'hydra' in looker.mixers
    assert looker.model().number == looker.model(2, '').number == 1
    assert looker.model(1, 'hydra').number == looker.model(1, 'hydra').number == 2
    assert looker.made[1] == ('file.pth', 'cuda:1', [['rala'], ['hydra', 'hydra'], ['softmax']])
    assert looker.model(0, 'hydra').number == 3 and len(looker.models) == 2
    assert looker.made[2][2] == [['hydra'], ['rala', 'rala'], ['softmax']]
    assert looker.model().number == 1 and looker.model(1, 'hydra').number == 4  # the one before is not kept


def test_a_backbone_of_others_is_refused(monkeypatch):
    monkeypatch.setattr(looking.loading, 'load_model', lambda *_: SimpleNamespace(backbone=nn.Linear(1, 1)))
    with pytest.raises(RunError, match='the backbone Linear is none of mmlinattn.'):
        looking.Looker(Config(dict()), 'none')


def test_what_was_looked_at_is_remembered(looker, monkeypatch):
    """The last two, by picture, stage and attention."""
    ran, moved, measured = [], [], []

    @contextlib.contextmanager
    def watched(model, keep):
        yield
        keep('block')

    def prepare(cfg, model, image, name):
        ran.append((model.number, image))
        return SimpleNamespace(inputs=torch.zeros(1))

    monkeypatch.setattr(looking.loading, 'prepare', prepare)
    monkeypatch.setattr(looking, 'watched', watched)
    monkeypatch.setattr(looking, 'measure_block', lambda *args: measured.append(args) or 'entry')
    monkeypatch.setattr(looking, 'numbers', lambda entry: [entry])
    monkeypatch.setattr(torch.Tensor, 'to', lambda self, *args: moved.append(args) or self)
    monkeypatch.setattr(looking.loading, 'run_backbone', lambda *_: None)
    monkeypatch.setattr(looking, 'predict', lambda model, picture, small: ('', small))
    image = np.zeros((8, 2048, 3), np.uint8)
    image[..., 0] = 200
    first = looker.look(image)
    assert first.scale == (0.5, 0.5) and first.drawn.shape == (4, 1024, 3)
    assert moved == [('cuda:1',)] and measured == [('block', ('rank', 'locality', 'sharpness'), 64)]
    assert (first.blocks, first.rows) == (['block'], [['entry']])
    assert ran[0][1].shape == (4, 1024, 3) and ran[0][1][0, 0].tolist() == [0, 0, 200]  # blue comes first there
    assert looker.look(image.copy()) is first and looker.look(image, 2, '') is first and len(ran) == 1
    other = looker.look(image, 0, 'hydra')
    assert other is not first and ran[1][0] == 2
    assert looker.look(image) is first  # now the one looked at last
    third = looker.look(image, 1, 'hydra')
    assert third is not other and looker.look(image) is first and looker.look(image, 1, 'hydra') is third
    assert looker.look(image, 0, 'hydra') is not other
    small = looker.look(image[:, :8])
    assert small.scale == (1, 1) and small.drawn.shape == (8, 8, 3)
    # the same bytes in another shape are another picture
    assert looker.look(np.zeros((8, 16, 3), np.uint8)).drawn.shape == (8, 16, 3)
    assert looker.look(np.zeros((16, 8, 3), np.uint8)).drawn.shape == (16, 8, 3)
    for shape in ((7, 100, 3), (100, 7, 3)):
        with pytest.raises(RunError, match='has to be in colour and at least 8 pixels wide and high.'):
            looker.look(np.zeros(shape, np.uint8))


def test_maps_of_keys_that_lie_on_no_map(looker, monkeypatch):
    asked = []
    picture = SimpleNamespace(to_shown=lambda x, y: (x + 1, y + 2))
    blocks = [SimpleNamespace(ratio=0), SimpleNamespace(ratio=2)]
    seen = looking.Seen(picture, (0.5, 0.25), blocks, [], '', None)
    monkeypatch.setattr(looking, 'collect_query', lambda *args: asked.append(args) or 'map')
    monkeypatch.setattr(looking, 'mosaic', lambda *args: args)
    assert looker.maps(seen, 20, 40, True) == (['map'], picture, 11, 12)
    assert asked == [(blocks[1], picture, 11, 12, True)]
    looker.maps(seen, 20, 40)
    assert asked[1][-1] is False
    with pytest.raises(RunError, match='the keys of this model lie on no map'):
        looker.maps(seen._replace(blocks=blocks[:1]), 20, 40)


# --- the page ---------------------------------------------------------------------------------------------------------


class Control:
    """Anything on a page: what it was made with, and what was put onto its events."""

    def __init__(self, kind, args, kwargs):
        self.kind, self.args, self.kwargs, self.events = kind, args, kwargs, []
        self.label = kwargs.get('label')

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        def on(*args, **kwargs):
            self.events.append((name, args, kwargs))
            return self

        return on


@pytest.fixture
def gradio(monkeypatch):
    """Stands for gradio: keeps what a page is made of."""
    made = []

    def maker(kind):
        def make(*args, **kwargs):
            made.append(Control(kind, args, kwargs))
            return made[-1]

        return make

    module = types.ModuleType('gradio')
    for kind in 'Blocks Markdown State Row Image Textbox Checkbox Dataframe Dropdown'.split():
        setattr(module, kind, maker(kind))
    module.Error, module.SelectData, module.made = RuntimeError, object, made
    monkeypatch.setitem(sys.modules, 'gradio', module)
    return module


class Looks:
    """Stands for a Looker."""

    stages, mixers = ['stage 1', 'stage 2'], ['hydra', 'rala']

    def look(self, image, stage=0, mixer=''):
        if mixer == 'rala':
            raise RunError('does not fit')
        return looking.Seen(None, 1, [], [[stage, mixer]], f'found {mixer}', f'drawn {mixer}')

    def maps(self, seen, x, y, local=False):
        return seen.found, x, y, local


def test_controls_of_the_page(gradio):
    functions = runpy.run_path(str(TOOL), run_name='app')
    page = functions['build_page'](Looks(), 'Attention of mine')
    assert page.kwargs['title'] == 'Attention of mine'
    by_label = {control.label: control for control in gradio.made if control.label}
    image, stage, mixer = by_label['picture: click it'], by_label['switch the attention of'], by_label['to']
    local = by_label['with the convolutions of the values (mean over channels)']
    assert stage.args == ([None, 'stage 1', 'stage 2'],) and mixer.args == ([None, 'hydra', 'rala'],)
    (click,) = (control for control in gradio.made if control.kind == 'State')
    tables = [control for control in gradio.made if control.kind == 'Dataframe']
    assert [table.kwargs['headers'] for table in tables] == [list(looking.COLUMNS)] * 2
    assert image.kwargs['type'] == 'numpy' and image.kwargs['image_mode'] == 'RGB'
    labels = ['what the model finds', 'found', 'where the clicked token looks', 'effective ranks, locality, sharpness']
    outputs = [by_label[label] for label in (*labels, 'where it looks then', 'found then', 'measures then')]
    inputs = [image, click, stage, mixer, local]
    for control in (stage, mixer, local):
        ((event, (show, given, shown_in), options),) = control.events
        assert event == 'change' and given == inputs and shown_in == outputs and options['api_name'] is False
    upload, then, select, then_too = image.events
    assert (upload[0], select[0]) == ('upload', 'select') and then[1] == then_too[1] == (show, inputs, outputs)
    assert upload[1][0]() is None and upload[1][2] is click and select[1][2] is click  # a new picture, no click
    assert select[1][0](SimpleNamespace(index=[3, 4])) == (3, 4)
    # what it shows
    photo = np.zeros((10, 30, 3), np.uint8)
    assert show(None, None, None, None, False) == (None, '', None, None, None, '', None)
    assert show(photo, None, None, 'hydra', False) == (
        *('drawn ', 'found ', ('found ', 15, 5, False), [[0, '']]),
        *(None, '', None),
    )
    assert show(photo, (3, 4), 'stage 2', 'hydra', True) == (
        *('drawn ', 'found ', ('found ', 3, 4, True), [[0, '']]),
        *(('found hydra', 3, 4, True), 'found hydra', [[1, 'hydra']]),
    )
    with pytest.raises(RuntimeError, match='does not fit'):
        show(photo, (3, 4), 'stage 2', 'rala', True)


def test_the_page_is_served_to_this_machine_only(gradio, monkeypatch, capsys):
    tool = runpy.run_path(str(TOOL), run_name='app')
    names, built, launched = tool['main'].__globals__, [], []

    def launch(**options):
        launched.append(options)
        if options['server_port'] == 1:
            raise OSError('taken')

    monkeypatch.setitem(names, 'read_config', lambda path: Config(dict(path=path)))
    monkeypatch.setitem(names, 'check_checkpoint', lambda path, name: f'checked {path}')
    monkeypatch.setitem(names, 'Looker', lambda *args: built.append(args) or 'looker')
    monkeypatch.setitem(names, 'build_page', lambda *args: built.append(args) or SimpleNamespace(launch=launch))
    monkeypatch.setenv('GRADIO_ANALYTICS_ENABLED', 'x')
    monkeypatch.delenv('GRADIO_ANALYTICS_ENABLED')

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['attention_app.py', 'some/mine.py', *args])
        names['main']()

    run('None')
    assert names['os'].environ['GRADIO_ANALYTICS_ENABLED'] == 'False'
    assert built[0][0].path == 'some/mine.py' and built[0][1:] == ('None', 'cpu')
    assert built[1] == ('looker', 'Attention of mine')
    page = dict(share=False, max_file_size='20mb', inbrowser=False)
    assert launched == [dict(server_name='127.0.0.1', server_port=7860, **page)]
    monkeypatch.setenv('GRADIO_ANALYTICS_ENABLED', 'True')  # who asks for it has it
    run('file.pth', '--port', '99', '--host', '0.0.0.0', '--device', 'cuda:1')
    assert built[2][1:] == ('checked file.pth', 'cuda:1')
    assert launched[1] == dict(server_name='0.0.0.0', server_port=99, **page)
    assert names['os'].environ['GRADIO_ANALYTICS_ENABLED'] == 'True'
    with pytest.raises(SystemExit):
        run('none', '--port', '1')
    assert 'error: --port 1: taken' in capsys.readouterr().err


def test_without_gradio_it_says_how_to_get_it(monkeypatch, capsys):
    """Before the model is built."""
    names = runpy.run_path(str(TOOL), run_name='app')['main'].__globals__
    monkeypatch.setitem(sys.modules, 'gradio', None)
    monkeypatch.setitem(names, 'read_config', lambda path: Config())
    monkeypatch.setitem(names, 'Looker', lambda *_: pytest.fail('a model was built'))
    monkeypatch.setattr(sys, 'argv', ['attention_app.py', 'mine.py', 'none'])
    with pytest.raises(SystemExit) as stop:
        names['main']()
    message = 'error: the page needs gradio: pip install "mmlinattn[app]" or pip install gradio\n'
    assert stop.value.code == 1 and capsys.readouterr().err == message
