"""Whether the hub can be reached: asked before a library tries again and again."""

import importlib

import huggingface_hub
from huggingface_hub import constants

TIMEOUT_S = 5.0
"""Most time that connecting and the answer may take, each."""


def out_of_reach() -> str | None:
    """Why the hub can't be reached; None where it answers, whatever it says."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    session = huggingface_hub.get_session()
    client = importlib.import_module(type(session).__module__.partition(".")[0])  # httpx, or httpx2 in later releases
    try:
        session.head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except client.TransportError as error:
        return f"{constants.ENDPOINT} doesn't answer: {error or type(error).__name__}"
    return None
