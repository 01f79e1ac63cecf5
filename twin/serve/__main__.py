"""``python -m twin.serve``: the same as ``twinkeel twin serve``."""

from twin.serve.cli import serve

if __name__ == "__main__":
    serve()
