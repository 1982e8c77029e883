# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# read by mim and MMEngine inside an installed OpenMMLab package
MIM_CONTENT = ('configs', 'tools', 'mmcv_ops', 'model-index.yml')
LEFT_OUT = ('__pycache__', '*.py[cod]', '*.egg-info', 'build', 'tests', 'results')


def read_version() -> str:
    """Return the version. Importing the package would need torch at build time."""
    text = (ROOT / 'mmlinattn' / 'version.py').read_text(encoding='utf-8')
    match = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    if match is None:
        raise RuntimeError("mmlinattn/version.py has no line like __version__ = '1.2.3'")
    return match.group(1)


def project_urls() -> dict:
    """Return the addresses shown by package indexes: the repository of CITATION.cff, and the released weights."""
    found = re.search(r'^repository-code: (\S+)$', (ROOT / 'CITATION.cff').read_text(encoding='utf-8'), re.MULTILINE)
    own = {'Source': found[1], 'Issues': f'{found[1]}/issues'} if found else {}
    return {
        **own,
        'RALA weights': 'https://github.com/qhfan/RALA',
        'InLine weights': 'https://github.com/LeapLabTHU/InLine',
        'FLatten weights': 'https://github.com/LeapLabTHU/FLatten-Transformer',
    }


def read_requirements(name: str) -> list:
    """Return the requirement lines of ``requirements/{name}.txt`` without comments."""
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text(encoding='utf-8').splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith('#')]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    else:
        shutil.copy2(source, target)


class BuildWithMim(build_py):
    """Put configs, tools, MMCV's operators and the model index under ``mmlinattn/.mim``.

    A wheel gets copies, an editable install gets links.
    """

    def run(self) -> None:
        super().run()
        editable = getattr(self, 'editable_mode', False)
        package = ROOT / 'mmlinattn' if editable else Path(self.build_lib) / 'mmlinattn'
        mim = package / '.mim'
        mim.mkdir(parents=True, exist_ok=True)
        for name in MIM_CONTENT:
            source, target = ROOT / name, mim / name
            # a stale build folder must not bring deleted configs back
            remove(target)
            if not source.exists():
                continue
            if editable:
                try:
                    target.symlink_to(os.path.relpath(source, mim), source.is_dir())
                    continue
                except OSError:  # Windows without the right to make links
                    pass
            copy(source, target)


setup(
    name='mmlinattn',
    version=read_version(),
    description='Linear-attention backbones for MMDetection, MMSegmentation and MMPretrain',
    long_description=((ROOT / 'README.md').read_text(encoding='utf-8') if (ROOT / 'README.md').exists() else ''),
    long_description_content_type='text/markdown',
    author='The mmlinattn authors',
    project_urls=project_urls(),
    license_expression='Apache-2.0',
    license_files=['LICENSE'],
    keywords='computer vision, linear attention, object detection, semantic segmentation',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Operating System :: OS Independent',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Programming Language :: Python :: 3.14',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Topic :: Scientific/Engineering :: Image Recognition',
        'Typing :: Typed',
    ],
    packages=find_packages(include=['mmlinattn', 'mmlinattn.*']),
    py_modules=['mmlinattn_console'],
    entry_points={'console_scripts': ['mmlinattn=mmlinattn_console:main']},
    package_data={'mmlinattn': ['py.typed', '*.csv', '*.json', '**/*.csv', '**/*.json']},
    # links that an editable install left in the checkout
    exclude_package_data={'mmlinattn': ['.mim/*']},
    python_requires='>=3.10',
    install_requires=read_requirements('runtime'),
    extras_require={
        'mim': read_requirements('mminstall'),
        'export': read_requirements('export'),
        'app': read_requirements('app'),
        'docs': read_requirements('docs'),
        'tests': read_requirements('tests') + read_requirements('export'),
        'all': read_requirements('mminstall') + read_requirements('tests') + read_requirements('export'),
    },
    cmdclass={'build_py': BuildWithMim},
    zip_safe=False,
)
