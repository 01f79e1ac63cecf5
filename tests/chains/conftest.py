"""Served twins and controllers, as the controller's own tests have them."""

from tests.controller.conftest import controllers, served_twins, twins

__all__ = ["controllers", "served_twins", "twins"]
