"""Tests in the environments of other trainers; some of these have torchvision."""

import tests.helpers.torchvision_stub  # noqa: F401
