# Flags every target of ours gets; never those of the libraries.
add_library(weft_flags INTERFACE)
target_include_directories(weft_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(weft_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Werror;-Wno-missing-field-initializers>)
if(WEFT_SANITIZE)
  list(JOIN WEFT_SANITIZE "," sanitizers)
  target_compile_options(weft_flags INTERFACE -fsanitize=${sanitizers} -fno-omit-frame-pointer
                                              -fno-sanitize-recover=all)
  target_link_options(weft_flags INTERFACE -fsanitize=${sanitizers})
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  target_compile_options(weft_flags INTERFACE -Wthread-safety)
endif()

# weft_library(name SRCS a.cc b.cc [DEPS targets...])
function(weft_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  target_link_libraries(${name} PUBLIC weft_flags ${ARG_DEPS})
endfunction()

# weft_binary(name SRCS main.cc [DEPS targets...]): built and installed.
function(weft_binary name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE weft_flags ${ARG_DEPS})
  install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endfunction()

# What the sanitizer builds build: the tests labelled for them.
foreach(sanitizer asan tsan tsan_all)
  add_custom_target(${sanitizer}_tests)
endforeach()

# weft_test(name SRCS a_test.cc [DEPS targets...] [LABELS labels...] [TIMEOUT seconds])
# One gtest binary, one ctest entry. WEFT_SOURCE_DIR tells it where tests/data is.
# Labels: "long" is left out by scripts/test.sh without --all; "asan" / "tsan" pick what the sanitizer builds run,
# "tsan_all" what the latter runs with --all.
function(weft_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE weft_flags ${ARG_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE WEFT_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  foreach(sanitizer asan tsan tsan_all)
    if(sanitizer IN_LIST ARG_LABELS)
      add_dependencies(${sanitizer}_tests ${name})
    endif()
  endforeach()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT "UCX_NET_DEVICES=lo;UCX_MEM_EVENTS=n;WEFT_BIN_DIR=${CMAKE_BINARY_DIR}/bin")
endfunction()
