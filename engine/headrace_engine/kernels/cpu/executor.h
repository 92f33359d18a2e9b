// What an executor owns; decoder.h declares the functions that make one.
#pragma once

#include "pool.h"
#include "workspace.h"

struct headrace_executor {
  headrace::Pool pool;
  headrace::Memory memory;
  explicit headrace_executor(int threads) : pool(threads) {}
};
