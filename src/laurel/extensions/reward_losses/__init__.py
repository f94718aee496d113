"""Losses of reward models beside that of Bradley and Terry."""
