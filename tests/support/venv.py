"""Isolated environments for the tests, kept beside the checkout so that they are made once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Of what `FRAMEWORKS` names one environment is made, which is large.
FRAMEWORKS = (
    *("torch==2.13.0", "accelerate==1.15.*", "lightning==2.6.*", "transformers==5.23.*"),
    *("grpcio", "protobuf", "tenacity", "msgspec", "xxhash", "tensorboard"),
)


def venv(name: str, *requirements: str) -> Path:
    """The Python of an environment with exactly these packages (and what they need).

    Each version of Python has its own.
    """
    folder = ROOT / f".venv-compat-{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    done = folder / "requirements.txt"
    wanted = "\n".join(requirements)
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True)
        done.write_text(wanted)
    return python


def venv_or_skip(name: str, *requirements: str) -> Path:
    """The same; skips the test where pip can't get them, since these are large."""
    try:
        return venv(name, *requirements)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip can't install {', '.join(requirements)}: exit {error.returncode}")
