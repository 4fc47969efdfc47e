"""The HTTP service: the OpenAI API over a `ServedEngine`."""

from peftkit_serve.http.app import create_app
from peftkit_serve.http.logs import write_json_lines
from peftkit_serve.http.server import bind, is_loopback, serve, url_of
from peftkit_serve.http.settings import Settings

__all__ = ["create_app", "Settings", "bind", "is_loopback", "serve", "url_of", "write_json_lines"]
