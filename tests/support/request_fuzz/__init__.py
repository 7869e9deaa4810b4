"""Odd values in every field of every open route, while another tenant's streams run."""
