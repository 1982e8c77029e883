# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import io
import runpy
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

TOOL = Path(__file__).parents[1] / 'tools' / 'analysis_tools' / 'contact_sheet.py'
COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]


def run_tool(*args):
    return runpy.run_path(str(TOOL))['main']([str(arg) for arg in args])


@pytest.fixture
def show_dir(tmp_path):
    """Five one-coloured pictures, as mmdet (.jpg) and mmseg (.png in sub-folders) name them."""
    folder = tmp_path / 'show'
    (folder / 'vis_data' / 'vis_image').mkdir(parents=True)
    for i, colour in enumerate(COLOURS[:3]):
        Image.new('RGB', (320, 160), colour).save(folder / f'{i:012d}.jpg')
    for i, colour in enumerate(COLOURS[3:]):
        Image.new('RGB', (320, 160), colour).save(folder / 'vis_data' / 'vis_image' / f'test_ADE_val_{i}.png')
    return folder


def shown(sheet):
    """Indices of the colours found on the sheet, by their place from the top left."""
    pixels = np.asarray(Image.open(sheet).convert('RGB')).astype(int)
    places = {}
    for i, colour in enumerate(COLOURS):
        ys, xs = np.nonzero(np.abs(pixels - colour).max(axis=-1) < 12)
        if len(ys) > 1000:
            places[i] = (ys.min(), xs.min())
    return sorted(places, key=places.get)


def test_all_pictures_in_order(show_dir, tmp_path, capsys):
    sheet = tmp_path / 'new' / 'deep' / 'sheet.png'
    assert run_tool(show_dir, sheet, '--width', 200) == 0
    assert shown(sheet) == [0, 1, 2, 3, 4]
    picture = Image.open(sheet)
    assert picture.format == 'PNG'
    assert 2 * 200 < picture.width < 2 * 260 and 3 * 100 < picture.height < 3 * 170
    assert capsys.readouterr().out == f'{sheet}: 5 of 5 pictures in 3 rows\n'


def test_columns_and_spread(show_dir, tmp_path):
    sheet = tmp_path / 'sheet.png'
    assert run_tool(show_dir, sheet, '--num', 3, '--cols', 3, '--width', 100) == 0
    assert shown(sheet) == [0, 2, 4]
    assert Image.open(sheet).width > 300
    assert run_tool(show_dir, sheet, '--num', 1, '--cols', 3, '--width', 100) == 0
    assert shown(sheet) == [0] and Image.open(sheet).width < 200


def test_letters_have_the_size_that_is_asked_for():
    font = runpy.run_path(str(TOOL))['font']
    assert [font(size).size for size in (15, 16)] == [15, 16]


@pytest.mark.parametrize('highest', [0, 1])
def test_where_pictures_lie(show_dir, tmp_path, highest):
    """A margin of 12, captions and labels 44 high, rows as high as their highest picture."""
    Image.new('RGB', (320, 320), COLOURS[highest]).save(show_dir / f'{highest:012d}.jpg')
    sheet = tmp_path / 'sheet.png'
    assert run_tool(show_dir, sheet, '--width', 100) == 0
    with Image.open(sheet) as picture:
        assert picture.size == (12 + 2 * 112, 12 + (100 + 56) + 2 * (50 + 56))
        for i, (left, top, height) in enumerate(
            [(12, 56, 100 - 50 * highest), (124, 56, 50 + 50 * highest), (12, 212, 50), (124, 212, 50), (12, 318, 50)]
        ):
            for x, y in ((left + 1, top + 1), (left + 98, top + height - 2)):
                assert max(abs(a - b) for a, b in zip(picture.getpixel((x, y)), COLOURS[i])) < 12
            assert picture.getpixel((left - 2, top + 5)) == picture.getpixel((left + 5, top + height + 2)) == (255,) * 3


def test_defaults_are_those_of_the_help(tmp_path, capsys):
    """Eight pictures, evenly spread, in two columns of 640 pixels; suffixes in any case, nothing that is no picture."""
    for i in range(10):
        Image.new('RGB', (64, 2), (25 * i, 0, 0)).save(tmp_path / f'{i}.PNG')
    (tmp_path / 'text.txt').touch()
    sheet = tmp_path / 'out' / 'sheet.png'
    assert run_tool(tmp_path, sheet) == 0
    assert capsys.readouterr().out == f'{sheet}: 8 of 10 pictures in 4 rows\n'
    with Image.open(sheet) as picture:
        assert picture.size == (12 + 2 * 652, 12 + 4 * (20 + 56))
        reds = [picture.getpixel((332 + 652 * col, 66 + 76 * row))[0] for row in range(4) for col in range(2)]
    assert reds == [25 * i for i in (0, 1, 3, 4, 5, 6, 8, 9)]
    assert [path.name for path in sheet.parent.iterdir()] == ['sheet.png']  # nothing half written


def test_labels_are_written(show_dir, tmp_path):
    def ink(sheet, *args):
        assert run_tool(show_dir, sheet, '--num', 1, '--width', 300, *args) == 0
        pixels = np.asarray(Image.open(sheet).convert('L'))[:56]  # above the picture
        left, right = np.array_split(pixels < 128, 2, axis=1)
        return left.sum(), right.sum()

    bare_left, bare_right = ink(tmp_path / 'bare.png', '--heads')
    left, right = ink(tmp_path / 'sheet.png')
    assert bare_left > 50 and bare_right == 0  # the file's name only
    assert left > bare_left + 50 and right > 50


def test_what_is_written_where(show_dir, tmp_path, monkeypatch):
    """The file's name at the left above each picture; labels in the middle of its equal parts, in their order."""
    written, line = [], ImageDraw.ImageDraw.text

    def text(self, at, words, colour, font, **more):
        written.append((at, words, more.get('anchor')))
        line(self, at, words, colour, font, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, 'text', text)
    options = '--num', 3, '--width', 120, '--heads', 'image', 'truth', 'found'
    assert run_tool(show_dir, tmp_path / 'sheet.png', *options) == 0
    middles = [(20, 'image'), (60, 'truth'), (100, 'found')]
    places = [(12, 12, '000000000000.jpg'), (144, 12, '000000000002.jpg'), (12, 128, 'test_ADE_val_1.png')]
    assert written == [
        entry
        for left, top, name in places
        for entry in [((left, top), name, None), *(((left + x, top + 40), head, 'ms') for x, head in middles)]
    ]
    written.clear()  # as the visualisers draw them: the truth is on the left
    assert run_tool(show_dir, tmp_path / 'sheet.png', '--num', 1, '--width', 120) == 0
    assert written[1:] == [((42, 52), 'ground truth', 'ms'), ((102, 52), 'prediction', 'ms')]
    written.clear()
    assert run_tool(show_dir, tmp_path / 'sheet.png', '--num', 1, '--width', 120, '--heads', 'found') == 0
    assert written[1:] == [((72, 52), 'found', 'ms')]


@pytest.mark.parametrize('error', [TypeError, ImportError, OSError])
def test_labels_without_fonts_of_any_size(show_dir, tmp_path, monkeypatch, error):
    """An old Pillow, or one without FreeType: small letters, whole, in the middle above their part."""

    def load_default(*size):
        if size:
            raise error
        return ImageFont.load_default_imagefont()

    monkeypatch.setattr(ImageFont, 'load_default', load_default)
    assert run_tool(show_dir, tmp_path / 'sheet.png', '--num', 1, '--width', 200) == 0
    with Image.open(tmp_path / 'sheet.png') as sheet:
        ink = np.asarray(sheet.convert('L')) < 128
    assert ink[12:24, 12:100].any()  # the file's name
    for middle in (62, 162):
        rows, columns = np.nonzero(ink[30:56, middle - 50 : middle + 50])
        assert rows.min() > 0 and rows.max() < 24 and rows.max() - rows.min() >= 6
        assert abs((columns.min() + columns.max()) / 2 - 50) < 4


def test_pictures_of_any_kind(tmp_path):
    """With a palette, in grey, see-through, and so flat that a picture of that width has no row."""
    for name, mode, size in (
        ('a.bmp', 'P', (64, 64)),
        ('b.jpeg', 'L', (64, 64)),
        ('c.png', 'RGBA', (64, 64)),
        ('d.png', 'RGB', (500, 1)),
    ):
        Image.new(mode, size, 0).save(tmp_path / name)
    sheet = tmp_path / 'out' / 'sheet.PNG'
    assert run_tool(tmp_path, sheet, '--width', 64) == 0
    with Image.open(sheet) as picture:
        assert picture.mode == 'RGB' and picture.size == (12 + 2 * 76, 12 + (64 + 56) * 2)
        assert picture.getpixel((20, 200)) == picture.getpixel((96, 60)) == (0, 0, 0) == picture.getpixel((96, 176))


def test_a_sheet_that_cannot_be_written_leaves_nothing(show_dir, tmp_path, monkeypatch, capsys):
    def save(self, path, format):
        Path(path).write_bytes(b'half of it')
        raise OSError('no space left')

    sheet = tmp_path / 'out' / 'sheet.png'
    sheet.parent.mkdir()
    sheet.write_bytes(b'of before')
    monkeypatch.setattr(Image.Image, 'save', save)
    with pytest.raises(SystemExit):
        run_tool(show_dir, sheet)
    assert f'argument OUT.png: cannot write {sheet}: no space left' in capsys.readouterr().err
    assert [path.name for path in sheet.parent.iterdir()] == ['sheet.png'] and sheet.read_bytes() == b'of before'


def test_sheet_in_show_dir_is_not_collected_again(show_dir, monkeypatch, capsys):
    """Under whatever name for the same file."""
    sheet = show_dir / 'a_sheet.png'
    monkeypatch.chdir(show_dir)
    assert run_tool(show_dir, sheet) == 0
    first = sheet.read_bytes()
    for again in (sheet, 'a_sheet.png', show_dir / 'vis_data' / '..' / 'a_sheet.png'):
        assert run_tool(show_dir, again) == 0
        assert sheet.read_bytes() == first
    assert not list(show_dir.glob('.*'))
    # another picture of that name is one of them
    Image.new('RGB', (320, 160), (9, 9, 9)).save(show_dir / 'vis_data' / sheet.name)
    assert run_tool(show_dir, sheet) == 0 and capsys.readouterr().out.endswith(': 6 of 6 pictures in 3 rows\n')


def damaged_png():
    """Whose second piece of pixels has lost its name."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(buffer, 'PNG')
    begin, name, end = buffer.getvalue().rpartition(b'IDAT')
    return begin + b'\0' * len(name) + end


def test_broken_pictures_are_named_and_left_out(show_dir, tmp_path, capsys):
    huge = struct.pack('<2sIHHIIiiHH24x', b'BM', 54, 0, 0, 54, 40, 60000, 60000, 1, 24)  # 10 GB of pixels, as it says
    broken = [show_dir / f'00000000000{i}.jpg' for i in (1, 5, 6)]
    for path, content in zip(broken, (b'no picture', damaged_png(), huge)):
        path.write_bytes(content)
    assert run_tool(show_dir, tmp_path / 'sheet.png') == 0
    said = capsys.readouterr()
    for path, line in zip(broken, said.err.splitlines(), strict=True):
        assert line.startswith(f'warning: left out, cannot be read: {path}: ')
    assert said.out == f'{tmp_path / "sheet.png"}: 4 of 7 pictures in 2 rows\n'
    assert shown(tmp_path / 'sheet.png') == [0, 2, 3, 4]


@pytest.mark.parametrize(
    'args, message',
    [
        (['{tmp}/none', '{tmp}/sheet.png'], 'argument SHOW_DIR: no such folder'),
        (['{tmp}/empty', '{tmp}/sheet.png'], 'argument SHOW_DIR: no pictures'),
        (['{tmp}/broken', '{tmp}/sheet.png'], 'argument SHOW_DIR: none of the pictures'),
        (['{tmp}/show', '{tmp}/sheet.jpg'], 'argument OUT.png: must end in .png'),
        (['{tmp}/show', '{tmp}/show/000000000000.jpg/sheet.png'], 'argument OUT.png: cannot write'),
        (['{tmp}/show', '{tmp}/sheet.png', '--num', '0'], 'argument --num: must be at least 1'),
        (['{tmp}/show', '{tmp}/sheet.png', '--cols', '-2'], 'argument --cols: must be at least 1, got -2'),
        (['{tmp}/show', '{tmp}/sheet.png', '--width', '31'], 'argument --width: must be at least 32, got 31'),
    ],
)
def test_bad_arguments(show_dir, tmp_path, capsys, args, message):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'broken' / 'a.png').write_bytes(b'')
    with pytest.raises(SystemExit) as stopped:
        run_tool(*(arg.format(tmp=tmp_path) for arg in args))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / 'sheet.png').exists()
