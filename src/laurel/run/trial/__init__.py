"""Tests what training relies on, on this machine with small models (`laurel doctor --trial`)."""
