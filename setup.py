"""Builds the compiled part where there is a C compiler; without one the package still installs."""

from Cython.Build import cythonize
from setuptools import Extension, setup

native = Extension(
    "calinix.core._native",
    ["src/calinix/core/_native.pyx"],
    extra_compile_args=["-O3", "-fno-strict-aliasing", "-ffp-contract=off"],
    optional=True,
)
setup(ext_modules=cythonize([native], language_level=3))
