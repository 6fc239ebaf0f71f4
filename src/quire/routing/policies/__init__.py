"""Routing policies, one a file; `routing.find` lists them by name"""
