"""Holds the distribution `cacheblend-lab`; a package so that its tests are `lab.tests`, beside the root's `tests`."""
