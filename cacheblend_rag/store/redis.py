"""Stores entries in Redis or Valkey."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any, Final, Unpack

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.store.base import TIMEOUT_S, EntryInfo
from cacheblend_rag.store.calls import WRITE_FACTOR
from cacheblend_rag.store.kv import KVKey
from cacheblend_rag.store.remote import Head, RemoteOptions, RemoteStore, Written

PASSWORD_VARIABLE: Final = "REDISCLI_AUTH"  # redis-cli and valkey-cli read the same variable
_PREFIX: Final = "cacheblend:"  # prefix of all Redis keys of this library
_UNPUBLISHED_S: Final = 300
_A_TIME: Final = 1000

# The string `kv:<key>:<version>` holds an entry's bytes, the hash `entries` holds `<version> <size>`, the sorted set
# `used` holds
# the last use. Redis runs each script atomically, so that concurrent puts do not exceed the budget.
_PRELUDE: Final = """
local P = KEYS[1]
local ENTRIES, USED, BYTES = P..'entries', P..'used', P..'bytes'
local function payload(key, version) return P..'kv:'..key..':'..version end
local function now()
  local t = redis.call('TIME')
  local n = t[1] * 1000000 + t[2]
  local last = tonumber(redis.call('GET', P..'clock') or '0')
  if n <= last then n = last + 1 end  -- two uses never tie
  return string.format('%.0f', n)
end
local function use(key)
  local n = now()
  redis.pcall('ZADD', USED, n, key)  -- where the server's memory is full, it is read all the same
  redis.pcall('SET', P..'clock', n)
end
local function drop(key, version, size)
  redis.call('UNLINK', payload(key, version))  -- first: behind it the others are allowed with full memory, too
  redis.call('HDEL', ENTRIES, key)
  redis.call('ZREM', USED, key)
  redis.call('DECRBY', BYTES, size)
end
local function find(key)
  local entry = redis.call('HGET', ENTRIES, key)
  if not entry then return nil end
  local version, size = string.match(entry, '^(%x+) (%d+)$')
  if redis.call('EXISTS', payload(key, version)) == 0 then  -- expired, or the server needed the room
    drop(key, version, size)
    return nil
  end
  return version, tonumber(size)
end
local function evict(limit, most)
  local freed, count = 0, 0
  local bytes = tonumber(redis.call('GET', BYTES) or '0')
  while bytes - freed > limit and count < most do
    local victim = redis.call('ZRANGE', USED, 0, 0)[1]
    if not victim then  -- the server has dropped what was counted
      redis.call('DEL', BYTES)
      break
    end
    local entry = redis.call('HGET', ENTRIES, victim)
    if entry then
      local version, size = string.match(entry, '^(%x+) (%d+)$')
      drop(victim, version, size)
      freed, count = freed + tonumber(size), count + 1
    else  -- the server needed the room of the hash
      redis.call('ZREM', USED, victim)
    end
  end
  return freed, count
end
"""
_SCRIPTS: Final = {
    "head": """
local version, size = find(ARGV[1])
if not version then return false end
if ARGV[3] == '1' then use(ARGV[1]) end
local name = payload(ARGV[1], version)
return {version, redis.call('STRLEN', name), redis.call('GETRANGE', name, 0, ARGV[2] - 1)}
""",
    "publish": """
local key, version, size, budget, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6])
local old, old_size = find(key)
if old and ARGV[5] == '0' then
  redis.call('UNLINK', payload(key, version))
  use(key)
  return {0, 0}
end
if redis.call('EXISTS', payload(key, version)) == 0 then return redis.error_reply('the entry expired before it was published') end
if old then drop(key, old, old_size) end
local count = 0
if budget >= 0 then count = select(2, evict(budget - size, math.huge)) end
redis.call('HSET', ENTRIES, key, version..' '..size)
use(key)
redis.call('INCRBY', BYTES, size)
if ttl > 0 then redis.call('PEXPIRE', payload(key, version), ttl) else redis.call('PERSIST', payload(key, version)) end
return {1, count}
""",
    "remove": """
local version, size = find(ARGV[1])
if not version or (ARGV[2] ~= '' and ARGV[2] ~= version) then return 0 end
drop(ARGV[1], version, size)
return 1
""",
    "evict": "return {evict(tonumber(ARGV[1]), tonumber(ARGV[2]))}",
    "forget": "for _, key in ipairs(ARGV) do find(key) end",
}


class RedisStore(RemoteStore):
    """Stores KV entries in a Redis or Valkey server; all clients share the budget and the order of eviction.

    The server's persistence settings decide whether entries outlast a restart. The server is a single server or a
    primary with replicas, because the scripts use keys of several slots, which a Redis Cluster refuses.
    """

    def __init__(self, url: str, budget: int | None = None, **options: Unpack[RemoteOptions]):
        """Use the server at ``url``, and connect on first use.

        Args:
            url: ``redis://host:6379/0``, ``rediss://`` for TLS, ``unix://``. The password in the address takes
                precedence over the environment variable ``REDISCLI_AUTH``.
            budget: See :class:`KVStore`.
            options: See :class:`RemoteStore`.

        Raises:
            InputError: ``url`` is not an address of a Redis server.
        """
        timeout_s = options.get("timeout_s", TIMEOUT_S)

        def client(timeout_s: float) -> redis.Redis:
            return redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                # A connection that the server closed while idle is opened again, once.
                retry=Retry(NoBackoff(), 1, (redis.exceptions.ConnectionError,)),
                password=os.environ.get(PASSWORD_VARIABLE),  # a password in the address takes precedence
            )

        try:
            self._client: Any = client(timeout_s)
            self._writer: Any = client(timeout_s * WRITE_FACTOR)
        except ValueError as error:
            raise InputError(f"{url!r} is no address of a Redis server: {error}") from error
        failures = (redis.exceptions.RedisError, OSError)
        options.setdefault("tier", "redis")
        super().__init__(without_password(url), failures, budget, **options)
        self._scripts = {name: self._client.register_script(_PRELUDE + text) for name, text in _SCRIPTS.items()}

    def close(self) -> None:
        super().close()
        self._client.close()
        self._writer.close()

    def _run(self, name: str, *arguments: str | int, client: Any = None) -> Any:
        return self._scripts[name](keys=[_PREFIX], args=arguments, client=client or self._client)

    def _payload(self, key: KVKey, version: str) -> str:
        return f"{_PREFIX}kv:{key}:{version}"

    def _head(self, key: KVKey, nbytes: int, use: bool = True) -> Head | None:
        found = self._run("head", key, nbytes, int(use))
        return None if found is None else Head(int(found[1]), found[0].decode(), found[2])

    def _range(self, key: KVKey, version: str, offset: int, nbytes: int) -> bytes | None:
        data: bytes = self._client.getrange(self._payload(key, version), offset, offset + nbytes - 1)
        if len(data) < nbytes and not self._client.exists(self._payload(key, version)):
            return None
        return data

    def _write(self, key: KVKey, data: bytes, replace: bool) -> Written:
        version = secrets.token_hex(8)
        ttl_ms = -1 if self._ttl_s is None else max(1, round(1000 * self._ttl_s))
        try:
            # The string has a name that no client uses yet, and expires if this process dies before publishing the
            # entry.
            self._writer.set(self._payload(key, version), data, ex=_UNPUBLISHED_S)
            budget = -1 if self.budget is None else self.budget
            new, evicted = self._run(
                "publish", key, version, len(data), budget, int(replace), ttl_ms, client=self._writer
            )
        except redis.exceptions.OutOfMemoryError as error:
            raise StoreError(
                f"cannot write to the {self._calls.name}: its memory is full; give the tier a budget below the server's maxmemory"
            ) from error
        return Written(bool(new), int(evicted))

    def _remove(self, key: KVKey, version: str | None) -> bool:
        return bool(self._run("remove", key, version or ""))

    def _info(self, key: KVKey) -> EntryInfo | None:
        at = self._client.zscore(f"{_PREFIX}used", key)
        return next(iter(self._listed([(key.encode(), at)], self._client)), None) if at is not None else None

    def _list(self) -> list[EntryInfo]:
        used: Sequence[tuple[bytes, float]] = self._writer.zrange(f"{_PREFIX}used", 0, -1, withscores=True)
        parts = (used[begin : begin + _A_TIME] for begin in range(0, len(used), _A_TIME))
        return [entry for part in parts for entry in self._listed(part, self._writer)]

    def _listed(self, used: Sequence[tuple[bytes, float]], client: Any) -> list[EntryInfo]:
        """Describe the entries that still exist among ``used``, pairs of a key and the time of the last use."""
        keys = [key.decode() for key, _ in used]
        self._run("forget", *keys, client=client)  # drops the expired entries
        entries = zip(keys, used, client.hmget(f"{_PREFIX}entries", keys), strict=True)
        return [
            EntryInfo(KVKey(key), int(entry.split()[1]), self.tier, at / 1e6)
            for key, (_, at), entry in entries
            if entry is not None
        ]

    def _size(self) -> tuple[int, int]:
        return int(self._client.hlen(f"{_PREFIX}entries")), int(self._client.get(f"{_PREFIX}bytes") or 0)

    def _evict(self, to_bytes: int) -> tuple[int, int]:
        freed = evicted = 0
        while True:
            nbytes, count = map(int, self._run("evict", to_bytes, _A_TIME, client=self._writer))
            freed, evicted = freed + nbytes, evicted + count
            if count < _A_TIME:
                return freed, evicted


def without_password(url: str) -> str:
    """Return an address without password and options, fit for messages."""
    scheme, slashes, rest = url.partition("://")
    access, _, place = rest.rpartition("@")
    user = access.partition(":")[0]
    return f"{scheme}{slashes}{user}{'@' if user else ''}{place.partition('?')[0]}"
