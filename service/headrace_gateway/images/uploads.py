"""Reads images from the files that clients uploaded to /v1/files."""

from headrace_common.protocol.batches import FileNotStored, StoredFile
from headrace_common.protocol.redis.files import RedisFiles

from ..errors import ApiError, invalid

# The purpose of files with images.
IMAGE_PURPOSE = "vision"


class UploadedImages:
    """The uploaded images of all tenants. `files` is None if this server stores no files."""

    def __init__(self, files: RedisFiles | None) -> None:
        self._files = files

    async def find(self, file_id: str, name: str, tenant: str) -> StoredFile:
        """Returns the description of a tenant's image. Raises ApiError, which calls the field
        `name`."""
        try:
            file = await self._stored.get(file_id, tenant)
        except FileNotStored as error:
            raise not_stored(name, error) from error
        if file.purpose != IMAGE_PURPOSE:
            raise invalid(
                f"{name}: the file has the purpose '{file.purpose}'; upload the image with the "
                f"purpose '{IMAGE_PURPOSE}'.",
                param=name,
            )
        return file

    async def content(self, file: StoredFile) -> bytes:
        """Returns the bytes of an image that `find` has found. Raises FileNotStored."""
        return await self._stored.content(file)

    @property
    def _stored(self) -> RedisFiles:
        if self._files is None:
            raise invalid("This server stores no files: send a data: URL.", code="no_batches")
        return self._files


def not_stored(name: str, error: FileNotStored) -> ApiError:
    """Returns the error for a field `name` with the id of a file that is not stored."""
    return invalid(f"{name}: {error}. Upload the image again.", param=name, code=error.code)
