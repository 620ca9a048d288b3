# One text, compiled per instruction-set level, for the targets that hold the core.

if(MSVC AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "the core uses the vector types of GCC and Clang: on Windows set CMAKE_GENERATOR_TOOLSET=ClangCL")
endif()
find_package(Threads REQUIRED)

# Every operation is rounded on its own: no fused multiply-add. clang-cl takes Clang's options behind a prefix.
set(draftproof_pinned -ffp-contract=off -fno-math-errno -fno-trapping-math)
if(MSVC)
  set(draftproof_prefix /clang:)
  list(TRANSFORM draftproof_pinned PREPEND /clang:)
else()
  list(APPEND draftproof_pinned -O3 -fvisibility=hidden)
endif()

if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # Only headers that the border uses open the namespace of a level as an inline one.
  list(APPEND draftproof_pinned -Wno-inline-namespace-reopened-noninline)
endif()

# The lowest level first: templates of the standard library are shared, and the linker keeps the first copy.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(draftproof_levels x86_64_v2 x86_64_v3 x86_64_v4)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  set(draftproof_levels aarch64_neon)
else()
  set(draftproof_levels baseline)
endif()

function(draftproof_level name)
  add_library(level_${name} OBJECT ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/level.cpp)
  target_compile_definitions(level_${name} PRIVATE DRAFTPROOF_LEVEL=${name})
  target_compile_options(level_${name} PRIVATE ${draftproof_pinned})
  if(name MATCHES "^x86_64_(v[0-9])$")
    target_compile_options(level_${name} PRIVATE ${draftproof_prefix}-march=x86-64-${CMAKE_MATCH_1})
  endif()
  if(name STREQUAL "x86_64_v4")
    target_compile_options(level_${name} PRIVATE ${draftproof_prefix}-mprefer-vector-width=512)
  endif()
  set_target_properties(level_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

# Add the core to a target.
function(draftproof_core target)
  set(folder ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  target_sources(${target} PRIVATE ${folder}/levels.cpp ${folder}/threads.cpp)
  target_include_directories(${target} PRIVATE ${folder})
  # Inline functions live in a namespace per level, so that no level's code can stand in for another's.
  target_compile_definitions(${target} PRIVATE DRAFTPROOF_LEVEL=border)
  target_compile_options(${target} PRIVATE ${draftproof_pinned})
  foreach(name IN LISTS draftproof_levels)
    draftproof_level(${name})
    target_link_libraries(${target} PRIVATE level_${name})
  endforeach()
  target_link_libraries(${target} PRIVATE Threads::Threads)
endfunction()
