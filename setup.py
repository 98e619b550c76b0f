"""What pyproject.toml cannot say: the extension module made by cffi, and packages that live outside the root."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["infera", "infera.*", "kvd", "kvd.*"]), "infera_core", "infera.tools.locks"],
    # The binding lives beside the C it binds; the lock files live with the other requirements.
    package_dir={"infera_core": "csrc/infera_core", "infera.tools.locks": "requirements"},
    package_data={"": ["py.typed"], "infera.tools.locks": ["engine-*.lock"], "infera.hooks": ["site/*.py"]},
    cffi_modules=["csrc/build_ffi.py:ffi"],
    # The extension uses the stable ABI only, so one wheel serves Python 3.11 and everything newer.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
